"""Run the fuzzer: workers load mutated files under limits, and one that dies is replaced."""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from rnnaudit.errors import RnnauditError
from rnnaudit.loaders import load
from tests.fuzz import corpus
from tests.fuzz.mutate import mutated

SECONDS = 10
"""Of the processor's time, after which one load has hung."""

MEGABYTES = 1024
"""By how much one load may raise the memory in use; constants alone may take half of it."""

ADDRESS_SPACE = 16 << 30
"""Bytes that a worker may map: what asks for more fails at once, and swaps nothing out."""

HANGS_BELOW = 60
"""Seconds without a word after which a worker hangs where no alarm reaches it."""


class Hung(BaseException):
    """A load took too long; no ``except Exception`` stops it."""


def make(seed: int, index: int) -> tuple[str, bytes]:
    """Return input ``index`` of a seed, and the name of the file that it was made of."""
    rng = random.Random(f"{seed}/{index}")
    files = list(corpus.read())
    name, data = files[index % len(files)]
    return name, mutated(data, [other for _, other in files], rng)


def outcome(path: Path, name: str, data: bytes) -> str:
    """Load one input: ``model``, the id of a refusal in one line, or what went wrong."""
    file = path / f"input{Path(name).suffix}"
    file.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        load(file)
        said = "model"
    except RnnauditError as error:
        said = error.id if "\n" not in str(error) else f"FAIL more than one line: {error}"
        said = said if error.exit_code == 3 else f"FAIL exit code {error.exit_code}: {error}"
    except Hung:
        said = f"FAIL more than {SECONDS} s"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"FAIL {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return said if grown < MEGABYTES else f"FAIL {grown:.0f} MB more memory"


def hang(*_: object) -> None:
    raise Hung


def work(seed: int, start: int, stop: int) -> None:
    """Load a range of inputs, and print each outcome before the next begins."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, hang)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(prefix="rnnaudit-fuzz-") as folder:
        for path in sorted(corpus.FOLDER.iterdir()):
            load(path)  # the first of each format imports libraries
        for index in range(start, stop):
            name, data = make(seed, index)
            print(json.dumps([index, name, outcome(Path(folder), name, data)]), flush=True)


def supervise(seed: int, start: int, runs: int) -> list[tuple[int, str, str]]:
    """Run workers until every input has been loaded, or has killed one."""
    results: list[tuple[int, str, str]] = []
    index, stop = start, start + runs
    while index < stop:
        command = [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--worker"]
        command += ["--start", str(index), "--runs", str(stop - index)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            timer = time.monotonic()
            assert worker.stdout is not None
            signal.signal(signal.SIGALRM, lambda *_, w=worker: w.kill())
            signal.alarm(HANGS_BELOW)
            for line in worker.stdout:
                signal.alarm(HANGS_BELOW)
                results.append(tuple(json.loads(line)))
            signal.alarm(0)
            code = worker.wait()
        index = results[-1][0] + 1 if results else start
        if index < stop:
            seconds = time.monotonic() - timer
            results.append(
                (index, make(seed, index)[0], f"FAIL died ({code}) after {seconds:.0f} s")
            )
            index += 1
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int, help="load one input, and show its traceback")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.seed, args.start, args.start + args.runs)
        return 0
    if args.only is not None:
        name, data = make(args.seed, args.only)
        file = Path(tempfile.mkdtemp(prefix="rnnaudit-fuzz-")) / f"{args.only}{Path(name).suffix}"
        file.write_bytes(data)
        print(f"{name}, mutated, is {file}")
        print(load(file))
        return 0
    began = time.monotonic()
    results = supervise(args.seed, args.start, args.runs)
    failures = [result for result in results if result[2].startswith("FAIL")]
    for index, name, said in failures:
        print(f"--only {index}  ({name}): {said}")
    counts = collections.Counter(said for _, _, said in results if not said.startswith("FAIL"))
    ends = ", ".join(f"{count} {said}" for said, count in counts.most_common())
    print(
        f"{len(results)} inputs in {time.monotonic() - began:.0f} s: {ends}; {len(failures)} failed"
    )
    return min(1, len(failures))


if __name__ == "__main__":
    sys.exit(main())
