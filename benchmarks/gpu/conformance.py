# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on a GPU: one implementation, all dtypes, every case of every contract.

    PYTHONPATH=$HOME/site python benchmarks/gpu/conformance.py cases OUT.json IMPL [--workers 4]
    PYTHONPATH=$HOME/site python benchmarks/gpu/conformance.py batches OUT.json IMPL

`cases` is `vllm-fl verify --impl IMPL`, which writes each result down as it comes: an ended command
leaves what it found, and the next one goes on from there. `batches` compares, bit for bit, the rows
of every batch from 1 to 512 tokens with the same rows among 512, for every op that IMPL calls batch
invariant and whose tokens do not meet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from about import about, write_json
from kernel_points import batch_arguments, twin

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.types import Rejected
from vllm_fl.ops import CONTRACTS

LARGEST = 512
DTYPES = ("bfloat16", "float16", "float32")
CONTRACT_OF = {contract.name: contract for contract in CONTRACTS}


# -------------------------------------------------------------------------------------------- cases


def cases(arguments: argparse.Namespace) -> int:
    """Run the kit; 1 where something failed or nothing ran."""
    from vllm_fl.testing.matrix import check_matrix, select

    lines = arguments.out.with_suffix(".lines")
    lines.parent.mkdir(parents=True, exist_ok=True)
    before = read_lines(lines)
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in before))  # whole lines only
    known = {(r["op"], r["dtype"], r["case"]) for r in before}
    manager = get_default_manager()
    manager.ensure_initialized()
    registered = {i.impl_id for impls in _impls(manager).values() for i in impls}
    start = time.monotonic()
    report: dict[str, Any] = {"about": about(arguments.device), "impl": arguments.impl}
    if arguments.impl not in registered:
        report |= {"results": [], "left_out": [], "done": True, "error": "it is not registered"}
        write_json(arguments.out, report)
        print(f"CONFORMANCE {arguments.impl}: it is not registered")
        return 1
    selection = select(
        manager,
        device=arguments.device,
        impls=[arguments.impl],
        ops=arguments.ops or (),
        compile=arguments.compile,
    )
    jobs = tuple(
        job
        for job in selection.jobs
        if (selection.targets[job.target].contract.name, job.dtype, job.case) not in known
        and (not arguments.dtypes or job.dtype in arguments.dtypes)
    )
    with lines.open("a") as file:

        def on_result(result: Any) -> None:
            row = {
                "op": result.op,
                "dtype": result.dtype,
                "case": result.case,
                "status": result.status.value,
                "reason": result.reason,
                "problems": [(str(kind), what) for kind, what in result.problems],
                "seconds": round(result.seconds, 3),
            }
            print(json.dumps(row), file=file, flush=True)

        if jobs:
            check_matrix(
                replace(selection, jobs=jobs), workers=arguments.workers, on_result=on_result
            )
    report["results"] = read_lines(lines)
    report["left_out"] = [skip.to_dict() for skip in selection.left_out]
    report["done"] = True
    report["seconds"] = round(time.monotonic() - start, 1)
    write_json(arguments.out, report)
    count = Counter(r["status"] for r in report["results"])
    print(f"CONFORMANCE {arguments.impl}: {dict(count)} in {report['seconds']} s")
    for row in report["results"]:
        for kind, what in row["problems"]:
            text = what.replace("\n", " ")[:200]
            print(f"FAIL {row['op']} {row['dtype']} '{row['case']}': {kind}: {text}")
    return 1 if count["failed"] or not count["passed"] else 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without the one that was being written at the end."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _impls(manager: Any) -> Any:
    return manager.registry.snapshot().impls_by_op


# ------------------------------------------------------------------------------------------ batches


def batches(arguments: argparse.Namespace) -> int:
    """Every batch from 1 to 512; 1 where bits differ, an op fails or nothing ran."""
    manager = get_default_manager()
    manager.ensure_initialized()
    device = arguments.device
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for op, impls in _impls(manager).items():
        impl = next((i for i in impls if i.impl_id == arguments.impl), None)
        contract = CONTRACT_OF.get(op)
        if impl is None or contract is None or not contract.batched:
            continue
        row: dict[str, Any] = {"op": op, "dtype": "-", "size": "-"}
        if not impl.batch_invariant:
            rows.append({**row, "why": "makes no claim"})
            continue
        available = impl.availability(manager.device)
        if isinstance(available, Rejected):
            rows.append({**row, "why": available.reason})
            continue
        for dtype in arguments.dtypes or DTYPES:
            sized = batch_arguments(op, dtype, LARGEST)
            if not sized:
                rows.append({**row, "dtype": dtype, "why": "no sizes are known"})
            for size, make in sized:
                found = {"op": op, "dtype": dtype, "size": size}
                try:
                    with torch.inference_mode(), torch.device(device):
                        found |= all_batches(impl, contract, make(), arguments.step)
                except Exception as error:
                    found["why"] = f"{type(error).__name__}: {str(error)[:200]}"
                    found["failed"] = True
                rows.append(found)
    report = {"about": about(device), "impl": arguments.impl, "largest": LARGEST, "rows": rows}
    report["seconds"] = round(time.monotonic() - start, 1)
    write_json(arguments.out, report)
    bad = [r for r in rows if r.get("failed") or r.get("differ")]
    ran = sum("batches" in r for r in rows)
    print(f"BATCHES {arguments.impl}: {ran} ran, {len(bad)} differ, {report['seconds']} s")
    for row in bad:
        print("DIFFER", json.dumps(row))
    return 1 if bad or not ran else 0


def all_batches(impl: Any, contract: Any, args: tuple[Any, ...], step: int) -> dict[str, Any]:
    """Compare each batch with the first rows of the whole; where guards let it run."""
    if impl.backend is not None:
        impl.backend.load()
    names = contract.signature.parameter_names
    batched = [i for i, name in enumerate(names[: len(args)]) if name in contract.batched]
    facts = contract.signature.facts_of(*args) if contract.signature.facts else {}

    def outputs(tokens: int) -> list[Any] | str:
        part = [
            twin(a[:tokens]) if i in batched and a is not None else a for i, a in enumerate(args)
        ]
        said = impl.supports_layer(facts) if impl.supports_layer is not None else True
        said = impl.supports(*part) if said is True and impl.supports is not None else said
        if said is not True:
            return str(said)
        found = impl.fn(*part)
        return list(found) if isinstance(found, tuple) else [found]

    whole = outputs(LARGEST)
    if isinstance(whole, str):
        return {"why": f"refused: {whole}"}
    # What differs is asked for once, at the end: a device is not waited for 512 times.
    ran, verdicts = [], []
    for tokens in range(1, LARGEST + 1, step):
        found = outputs(tokens)
        if isinstance(found, str):
            continue
        pairs = [(a, b[:tokens]) for a, b in zip(found, whole, strict=True) if a is not None]
        ran.append(tokens)
        verdicts.append(torch.stack([differing_bits(a, b) for a, b in pairs]).any())
    wrong = torch.stack(verdicts).tolist() if verdicts else []
    differ = [tokens for tokens, is_wrong in zip(ran, wrong, strict=True) if is_wrong]
    return {"batches": len(ran), "differ": differ[:20]}


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether any bit differs, as a tensor where they are."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones((), dtype=torch.bool, device=a.device)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.contiguous().view(integer) != b.contiguous().view(integer)).any()


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = found.add_subparsers(required=True)
    for name, call in (("cases", cases), ("batches", batches)):
        command = commands.add_parser(name)
        command.add_argument("out", type=Path)
        command.add_argument("impl")
        command.add_argument("--device", default="cuda")
        command.add_argument("--dtypes", nargs="*")
        command.set_defaults(call=call)
        if call is cases:
            command.add_argument("--workers", type=int, default=4)
            command.add_argument("--ops", nargs="*")
            command.add_argument("--compile", action="store_true", help="with torch.compile")
        else:
            command.add_argument("--step", type=int, default=1, help="only every so manyth batch")
    return found


def main(argv: list[str] | None = None) -> int:
    """Check, write, print."""
    arguments = parser().parse_args(argv)
    return int(arguments.call(arguments))


if __name__ == "__main__":
    sys.exit(main())
