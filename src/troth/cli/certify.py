"""``troth certify``: proves a model's draft head by running it, and writes the certificate that lets it draft.

Read next: ``run/certification.py`` (what is proved), ``run/certificate.py`` (what a certificate binds),
``docs/speculation.md``.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

from troth import compose
from troth.cli import flags
from troth.cli.exit_code import DONE, FAILED
from troth.cli.progress import Progress
from troth.cli.table import table
from troth.cli.terminal import Terminal

if TYPE_CHECKING:
    from troth.run.certificate import Computation

_SHOWN_PROBLEMS: Final = 8


def run(args: Namespace, terminal: Terminal) -> int:
    """Prove, write and show.

    Raises:
        TrothError: the model cannot be loaded or has no draft head, or the certificate cannot be written.
    """
    model, engine = flags.model_options(args), flags.engine_options(args)
    artifact = compose.find(model)
    with Progress(terminal, "starting") as progress:
        certificate, path = compose.certify(artifact, model, engine, progress)
    findings: dict[str, Any] = certificate.findings
    proved = not findings["problems"]
    if proved:
        certificate.write(path)
    if args.json:
        value = {"certified": proved, "path": str(path) if proved else None, **dataclasses.asdict(certificate)}
        terminal.line(json.dumps(value, indent=2, ensure_ascii=False))
        return DONE if proved else FAILED
    verdict = "certified" if proved else "NOT certified"
    terminal.line(f"{certificate.model}: its draft head is {verdict}")
    terminal.line("")
    for line in table(_rows(findings)):
        terminal.line(line)
    for problem in findings["problems"][:_SHOWN_PROBLEMS]:
        terminal.line(f"- {problem}")
    if proved:
        terminal.line("")
        terminal.line(f"{path} speaks for these files, this version of Troth, {_numbers(certificate.computation)}.")
    return DONE if proved else FAILED


def _rows(findings: dict[str, Any]) -> list[tuple[str, str]]:
    right = findings["accepted_by_depth"]
    return [
        ("answers drafted for", f"{findings['num_tokens']} tokens over {findings['num_prompts']} prompts"),
        ("served by the prompt cache", f"{findings['num_cached_tokens']} tokens"),
        ("drafts", f"{findings['num_drafted']}, {findings['num_accepted']} of them right"),
        (
            f"steps by drafts right, of {findings['depth']}",
            ", ".join(f"{i}: {n}" for i, n in enumerate(right, start=1)),
        ),
        (
            "drafts computed plainly",
            f"{findings['num_compared']}, logits {findings['largest_difference']:.2g} off at most",
        ),
        ("differences within rounding", f"{findings['num_ties']}"),
        ("problems", f"{len(findings['problems'])}"),
    ]


def _numbers(computation: Computation) -> str:
    return f"computing in {computation.dtype} with a KV cache in {computation.kv_dtype} on {computation.device}"
