"""A name means one directory below the model directory, or a refusal; half a model is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omlx.models.locate import DEMO_ID, ModelUnavailable, list_models, locate, what_is_missing

ONE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_model(path: Path, *weights: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    for name in weights or (ONE,):
        save_file({"a": np.zeros(8, np.float32)}, path / name)
    return path


# ── names ────────────────────────────────────────────────────────────────────
def test_an_id_is_found_below_the_model_directory(tmp_path: Path) -> None:
    path = make_model(tmp_path / "org" / "small")

    assert locate("org/small", tmp_path).path == path
    assert locate("small", tmp_path).path == path
    assert locate("small", tmp_path).to_fetch is None


def test_an_unknown_repository_is_to_be_fetched_into_the_model_directory(tmp_path: Path) -> None:
    located = locate("org/small", tmp_path)

    assert (located.id, located.to_fetch, located.repo_id) == ("small", "hub", "org/small")
    assert located.path == tmp_path / "org" / "small"


def test_an_unknown_short_name_is_refused_and_never_looked_up_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such folder"):
        locate("small", tmp_path)


def test_demo_is_fetched_once(tmp_path: Path) -> None:
    assert locate("demo", tmp_path).to_fetch == "demo"

    make_model(tmp_path / DEMO_ID)

    assert locate("demo", tmp_path).to_fetch is None
    assert locate("demo", tmp_path).id == DEMO_ID


def test_a_path_on_the_command_line_may_lie_anywhere(tmp_path: Path) -> None:
    path = make_model(tmp_path / "elsewhere" / "small")

    located = locate(f"{path}/", tmp_path / "models")

    assert (located.id, located.path) == ("small", path)


def test_a_relative_path_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "here" / "small")
    monkeypatch.chdir(tmp_path)

    assert locate("./here/small", tmp_path / "models").path == path
    assert locate("here/small", tmp_path / "models").path == path


BAD_NAMES = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc",
    "~",
    "a/../b",
    "..%2f..",
    "C:\\x",
    "A" * 10_000,
    "\0",
    "a\0",
    "/\0",
    "org/",
    "/org",
    "org/a/b",
    ".hidden",
    "org/.hidden",
    "a\n",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_from_outside_never_leaves_the_model_directory(name: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "models"
    make_model(tmp_path / "b")
    make_model(model_dir / ".hidden")

    with pytest.raises(ModelUnavailable):
        locate(name, model_dir, allow_path=False)


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name != "/etc"])
def test_a_bad_name_on_the_command_line_is_one_short_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as refused:
        locate(name, tmp_path)

    assert "\n" not in str(refused.value)
    assert "\0" not in str(refused.value)
    assert len(str(refused.value)) < 300


# ── completeness ─────────────────────────────────────────────────────────────
def test_shards_are_whole_with_or_without_an_index(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FIRST, SECOND)
    assert what_is_missing(path) is None

    places = {"weight_map": {"a": FIRST, "b": SECOND}}
    (path / "model.safetensors.index.json").write_text(json.dumps(places))
    assert what_is_missing(path) is None


@pytest.mark.parametrize("indexed", [True, False])
def test_one_shard_of_two_is_half_a_model(indexed: bool, tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", FIRST)
    if indexed:
        places = {"weight_map": {"a": FIRST, "b": SECOND}}
        (path / "model.safetensors.index.json").write_text(json.dumps(places))

    with pytest.raises(ModelUnavailable, match=SECOND):
        locate(str(path), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", b"{", "config.json is damaged"),
        ("config.json", b"[]", "config.json is damaged"),
        ("tokenizer.json", None, "no tokenizer"),
        (ONE, None, "no weights"),
        (ONE, b"", "is cut off"),
        (ONE, b"\xff" * 64, "is cut off"),
        (ONE, b"\x02" + b"\0" * 7 + b"{}", "holds no tensors"),
        (ONE, b"\x18" + b"\0" * 7 + b'{"a":{"data_offsets":0}}', "has a damaged header"),
        ("config.json", b"[" * 100_000, "config.json is damaged"),
        (ONE + ".incomplete", b"", f"the download of {ONE} is not finished"),
    ],
)
def test_what_is_missing_is_named(
    name: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "m")
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)

    with pytest.raises(ModelUnavailable, match=said):
        locate("m", tmp_path)


def test_weights_cut_short_are_noticed_by_their_size(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    whole = (path / ONE).read_bytes()
    (path / ONE).write_bytes(whole[:-1])

    assert (
        what_is_missing(path)
        == f"{ONE} has {len(whole) - 1} bytes, its header promises {len(whole)}"
    )


# ── listing ──────────────────────────────────────────────────────────────────
def test_only_whole_models_are_listed_and_the_others_say_why(tmp_path: Path) -> None:
    root = tmp_path / "models"
    make_model(root / "good")
    make_model(root / "org" / "half", FIRST)
    make_model(root / ".partial" / "org--coming")
    (root / "placeholder").mkdir()
    (root / "placeholder" / "README.md").write_text("soon")
    (root / "file.txt").write_text("")
    elsewhere = make_model(tmp_path / "elsewhere")
    (root / "linked").symlink_to(elsewhere)
    (root / "dangling").symlink_to(tmp_path / "nowhere")

    listing = list_models(root)

    assert [model.id for model in listing.models] == ["good", "linked"]
    reasons = {one.id: one.reason for one in listing.unusable}
    assert reasons.keys() == {"half", "placeholder"}
    assert SECOND in reasons["half"]
    assert reasons["placeholder"] == "no config.json"


def test_two_models_of_one_name_have_two_ids_that_both_work(tmp_path: Path) -> None:
    make_model(tmp_path / "a" / "twin")
    make_model(tmp_path / "b" / "twin")

    ids = [model.id for model in list_models(tmp_path).models]

    assert ids == ["a/twin", "b/twin"]
    assert [locate(name, tmp_path).path for name in ids] == [tmp_path / name for name in ids]


def test_a_short_name_that_two_models_share_is_refused_naming_both(tmp_path: Path) -> None:
    make_model(tmp_path / "a" / "twin")
    make_model(tmp_path / "b" / "twin")

    with pytest.raises(ModelUnavailable, match="a/twin, b/twin"):
        locate("twin", tmp_path)


def test_half_a_model_asked_for_by_its_short_name_says_what_is_missing(tmp_path: Path) -> None:
    make_model(tmp_path / "org" / "half", FIRST)

    with pytest.raises(ModelUnavailable, match=SECOND):
        locate("half", tmp_path)


def test_a_model_directory_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert list_models(tmp_path / "none").models == ()
