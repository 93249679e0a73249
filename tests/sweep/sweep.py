"""Runs PyTorch's own samples through ORTModule and through PyTorch: ``python tests/sweep/sweep.py --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's own samples use what it calls deprecated
    import page
    from compare import FAILURES
    from pool import Result, run
    from samples import CARRIED, DTYPES, ERRORS, groups


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", metavar="REGEX", help="operators and modules whose name contains it")
    parser.add_argument("--dtype", action="append", choices=[*DTYPES, ERRORS, *CARRIED], help="these alone")
    parser.add_argument("--most", type=int, metavar="N", help="at most N samples of an operator and dtype")
    parser.add_argument("--sample", type=int, metavar="I", help="the I-th sample alone")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="the K-th of N parts, K from 0")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument(
        "--backend", choices=["export", "dynamo"], default="export", help="who captures: torch.export, or TorchDynamo"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument(
        "--coverage", action="store_true", help=f"write docs/coverage.md, from {page.MOST} samples each"
    )
    options = parser.parse_args()
    if options.coverage and (options.ops or options.dtype or options.most or options.sample or options.shard != "0/1"):
        parser.error("--coverage speaks of everything")
    if options.coverage and options.backend != "export":
        parser.error("--coverage speaks of what torch.export captures")
    # Of the processes that run the samples.
    os.environ["ORTMODULE_CAPTURE"] = options.backend
    os.environ["OMC_VERIFY"] = "1"
    part, parts = map(int, options.shard.split("/"))
    wanted = groups(options.ops, options.dtype or [*DTYPES, ERRORS])[part::parts]
    begin, results = time.monotonic(), []
    for result in run(wanted, page.MOST if options.coverage else options.most, options.sample, options.jobs):
        if isinstance(result, Result):
            results.append(result)
            if result.outcome.kind in FAILURES or options.sample is not None:
                print(result, flush=True)
    for dtype in [*DTYPES, ERRORS, *CARRIED]:
        counts = Counter(r.outcome.kind for r in results if r.group.dtype == dtype)
        if counts:
            print(
                f"{dtype}: {counts.total()} samples: " + ", ".join(f"{c} {kind}" for kind, c in sorted(counts.items()))
            )
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results]))
    if options.coverage:
        page.write(page.counted(sorted(results, key=lambda r: wanted.index(r.group))))
    return int(any(r.outcome.kind in FAILURES for r in results))


if __name__ == "__main__":
    sys.exit(main())
