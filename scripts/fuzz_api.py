"""Ask a server what nobody asks, by its own description, and see that it keeps to it.

    python scripts/fuzz_api.py --url http://127.0.0.1:8000 [--cases 1000] [--seed 1] [--key KEY]

A third of the requests breaks /openapi.json somewhere, a third keeps to it, and a third has a plain
conversation and leaves out what nobody guesses right, such as the name of a model, so that most of
them are answered. They are the same for the same seed. Wrong is an answer of 500 or more, one of a
content type that is not described, one that its schema does not allow, and a stream that ends with
a failure of the server. Each is printed with the curl command that repeats it; then the exit code
is 1. Needs schemathesis, which the extra ``dev`` brings. Answers are shorter, and the run too, if
the server has ``--max-context 128``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import booleans
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Err
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
OWN_FAILURES = ('"server_error"', '"api_error"')
"""What went wrong in the server after a stream's status was sent, in the words of the dialects."""
PATIENCE_S = 30.0
PLAIN = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
GUESSED = re.compile(
    r"background|best_of|chat_template_kwargs|conversation|functions|grammar|guided_.*|logit_bias|"
    r"mcp_servers|modalities|model|n|output_config|previous_response_id|prompt_cache_options|"
    r"reasoning(_effort)?|response_format|stop.*|structured_outputs|suffix|text|thinking|"
    r"tool_choice|tools|(top_)?logprobs"
)
"""Fields whose values mean something that a schema does not say."""
UNCHECKED = (HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.too_slow)
PATHS = 40
"""Cases of a route that takes a name in its path."""


def plain(body: Any, streamed: bool) -> dict[str, Any]:
    fields = {k: PLAIN.get(k, v) for k, v in body.items() if not GUESSED.fullmatch(k)}
    return {**fields, "stream": streamed}


@dataclass
class Found:
    statuses: Counter[int] = field(default_factory=Counter)
    streams: int = 0
    wrong: list[str] = field(default_factory=list)
    """What was wrong, and how to repeat it."""

    @property
    def cases(self) -> int:
        return self.statuses.total()


def fuzz(url: str, cases: int, first_seed: int, key: str | None = None) -> Found:
    """Send at least ``cases`` requests, one after the other.

    A route that takes nothing is asked once; those that take a body share most.
    """
    headers = {} if key is None else {"x-api-key": key}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations: list[APIOperation] = []
    for result in schema.get_all_operations():
        if isinstance(result, Err):
            raise result.err()
        operations.append(result.ok())
    found = Found()
    with requests.Session() as session:
        session.headers.update(headers)
        asked = Asker(url, session, found)
        takers = [one for one in operations if one.body]
        for operation in operations:
            if not operation.body:
                # Of a path every text is one, so there is nothing to break.
                count = PATHS if operation.path_parameters else 1
                asked.ask(operation, GenerationMode.POSITIVE, count, first_seed)
        share = -(-(cases - found.cases) // (3 * len(takers)))
        for operation in takers:
            asked.ask(operation, GenerationMode.NEGATIVE, share, first_seed)
            asked.ask(operation, GenerationMode.POSITIVE, share, first_seed)
            asked.ask(operation, GenerationMode.POSITIVE, share, first_seed, plainly=True)
    return found


@dataclass(frozen=True)
class Asker:
    url: str
    session: requests.Session
    found: Found

    def ask(
        self,
        operation: APIOperation,
        mode: GenerationMode,
        count: int,
        number: int,
        plainly: bool = False,
    ) -> None:
        @seed(number)
        @settings(
            max_examples=count,
            phases=[Phase.generate],
            deadline=None,
            database=None,
            suppress_health_check=UNCHECKED,
        )
        @given(operation.as_strategy(generation_mode=mode), booleans())
        def send(case: Case, streamed: bool) -> None:
            if plainly:
                case.body = plain(case.body, streamed)
            self._send(case)

        send()

    def _send(self, case: Case) -> None:
        answer = case.call(base_url=self.url, session=self.session, timeout=PATIENCE_S)
        self.found.statuses[answer.status_code] += 1
        try:
            case.validate_response(answer, checks=CHECKS)
        except FailureGroup as group:
            what = "; ".join(failure.title for failure in group.exceptions)
            self._note(what, case, answer.text)
        if "text/event-stream" in answer.headers.get("content-type", [""])[0]:
            self.found.streams += 1
            if any(code in answer.text for code in OWN_FAILURES):
                self._note("a stream failed", case, answer.text)

    def _note(self, what: str, case: Case, text: str) -> None:
        self.found.wrong.append(f"{what}: {text[-300:]}\n    {case.as_curl_command()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a server by its own /openapi.json.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key")
    args = parser.parse_args()
    found = fuzz(args.url, args.cases, args.seed, args.key)
    for text in found.wrong:
        print(text, file=sys.stderr)
    print(
        f"{found.cases} cases, {found.streams} of them streams, {len(found.wrong)} wrong; "
        f"by status: {dict(sorted(found.statuses.items()))}"
    )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
