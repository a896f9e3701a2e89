"""A row that had to wait again is one request: its prompt counts once, as it was first found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.core import admission
from omlx.core.record import record_of
from omlx.core.usage import Totals
from omlx.engine.load import LoadedModel
from tests.engine.rig import Rig
from tests.engine.test_memory import drawn_prompt, tight


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("warm", [False, True])
def test_what_is_restored_for_a_row_that_is_back_is_no_hit(
    loaded: Callable[[str], LoadedModel],
    name: str,
    warm: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B101: processed and cached are those of its first admission, however often it came back."""
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)
    model = loaded(name)
    prompts = [drawn_prompt(seed, 40 + seed) for seed in range(4)]
    if warm:
        before = Rig(model, files=tmp_path)
        for prompt in prompts:
            before.ask(prompt, 1)
    rig = Rig(model, files=tmp_path, memory=tight(model, 260))

    uids = [rig.submit(prompt, 80) for prompt in prompts]
    rig.run()

    came_back = {
        admit.uid for plan in rig.plans for admit in plan.admits if admit.sampling.drawn > 0
    }
    assert came_back, "nobody had to wait again"
    totals = Totals()
    for uid, prompt in zip(uids, prompts, strict=True):
        closed = rig.answers[uid].closed
        assert closed is not None
        record = record_of([closed], wall_s=0.0, now_s=0.0)
        assert record.prompt_tokens == len(prompt)
        assert record.cached_tokens == (len(prompt) - 1 if warm else 0)
        assert record.cached_ram + record.cached_ssd == record.cached_tokens
        assert record.generated_tokens == 80
        totals.add(record)
    totals.check()
    assert totals.processed_tokens == sum(map(len, prompts))
    assert totals.completed == len(prompts)
