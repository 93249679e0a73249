"""The command line of what runs a program for each of many seeds."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from typing import Any

import torch


def run(words: Callable[[int], str], verdict: Callable[[int, Any], tuple[str, str]], seeds: str, capture: str) -> int:
    """Print what differs, and why programs ran in PyTorch; 1 if something does.

    Parameters
    ----------
    words
        A seed's program, for people.
    verdict
        What differed for a seed and a way to capture, and those words with where it ran; nothing, or.
    seeds, capture
        Where nothing else is asked for: ``"0:1000"``, ``"auto"``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--capture", choices=["export", "dynamo", "auto"], default=capture)
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    failures, causes = 0, collections.Counter[str]()
    for seed in range(first, last):
        try:
            what, cause = verdict(seed, options.capture)
        except Exception as error:
            what, cause = f"seed {seed}: {words(seed)}: {type(error).__name__}: {error}", ""
        if what:
            failures += 1
            print(what, flush=True)
        if cause:
            causes[cause.removeprefix(f"{words(seed)}: ")] += 1
    print(f"{last - first} programs: {failures} differ, {causes.total()} run in PyTorch, or in parts")
    for cause, n in causes.most_common(30):
        print(f"{n:5} {cause}")
    return int(failures > 0)
