"""The public API: load a model, audit it, truncate it, verify that two models agree."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

from numpy.typing import NDArray
from torch import Tensor, nn

from rnnaudit import (
    assembly,
    checking,
    conversion,
    deviations,
    loaders,
    proving,
    replaying,
    swap,
    trial,
)
from rnnaudit.arguments import checked
from rnnaudit.data import Data, InputRange, load_data, of_arrays
from rnnaudit.effects import Effects
from rnnaudit.errors import RnnauditWarning, UnsupportedModelError, UsageError
from rnnaudit.examine import Examination, Progress, Settings, examine
from rnnaudit.loaders.module import made, read_module
from rnnaudit.model import Model
from rnnaudit.observe import observe, observe_rows
from rnnaudit.planning import Wanted, chosen, plans, set_aside
from rnnaudit.refutation import load_witness, save_witness
from rnnaudit.reports.numbers import counted
from rnnaudit.reports.wording import grouped
from rnnaudit.results import BY_CHOICE, MAX_DEPTH, Export, Norm, Report, Skipped
from rnnaudit.truncation import FormName, Shape
from rnnaudit.verification import live
from rnnaudit.verification import verify as compare
from rnnaudit.verification.twins import contradictions

Source = Model | str | Path | nn.Module

Sequences = Data | str | Path | NDArray[Any] | Tensor | list[Any] | Mapping[str, Any]
"""Where sequences come from: a path, or arrays [T, F] or [N, T, F], also by graph input."""

Calls = tuple[Any, ...] | list[tuple[Any, ...]]
"""What a live module is called with: the arguments of one call, or of several."""


@checked
def load(
    source: str | Path | nn.Module,
    *,
    trust_pickle: bool = False,
    weights: str | Path | None = None,
) -> Model:
    """Read a PyTorch or ONNX file, executing nothing in it, or the recurrences of a live module.

    Args:
        source: A path; or a module, which is run once, in eval mode, to see whether it does
            more than its recurrence.
        trust_pickle: Unpickle a PyTorch file that needs code, which runs whatever it says.
        weights: A .npz or .safetensors file of the values that an ONNX graph takes as inputs,
            by their names.

    Raises:
        LoadError: The file is missing, damaged, or of a kind that is not read.
        UnsupportedModelError: It was read, and holds no recurrence that can be audited.
    """
    if isinstance(source, nn.Module):
        return live.confirmed(read_module(source), source)
    if not isinstance(source, (str, Path)):
        raise _no_model(source)
    return loaders.load(source, trust_pickle=trust_pickle, weights=weights)


@checked
def build(factory: str, weights: str | Path | None = None) -> Model:
    """Run ``package.module:callable``, and read the recurrences of the module that it returns.

    Args:
        factory: What to import and call without arguments.
        weights: A file of the module's state_dict, to load into it.

    Raises:
        LoadError: It fails, or returns no module, or the weights do not fit it.
        UnsupportedModelError: The module holds no recurrence that can be read.
    """
    module = made(factory, None if weights is None else Path(weights))
    return live.confirmed(read_module(module, Path(factory)), module)


@checked
def audit(
    model: Source,
    *,
    eps: float = 1e-3,
    norm: Norm = "max",
    data: Sequences | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    witness: str | Path | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    exceed: float | None = None,
    time_budget: float | None = None,
    pictures: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Say how far back each recurrence of a model remembers, and on what evidence.

    Args:
        model: A loaded model, or the path of one.
        eps: Wanted accuracy ε of the output, in ``norm``.
        norm: ``max`` (per output unit) or ``2`` over the output's units.
        data: Sequences to measure on, or where to read them: a path, an array [T, F] or
            [N, T, F], a list of arrays [T, F], or a mapping of these by graph input;
            synthetic ones without.
        input_range: Bounds of every input feature that proofs assume, or ``one-hot``; without,
            the data's box (their one-hot vectors, where they are such), or |x| ≤ 1.
        layer: Audit only recurrences whose label contains this.
        witness: Where to save the inputs that refute most depths for ``eps``, if any are
            found: an ``.npz`` of ``prefix`` [P, I], ``inputs`` [L, I] and ``distances``
            [L + 1], the error at each depth from 0 to L.
        seed: Of everything that is random.
        confidence: Of the statements about unseen sequences.
        exceed: Share of unseen sequences that may exceed ``eps`` at the measured depth; as
            many of those measured are set aside as the confidence allows. None sets none
            aside.
        time_budget: Seconds for proofs and measurements; what it cuts short is labelled.
        pictures: Also compute what only the charts of an HTML report show.
        progress: Called with what is being done and the share that is done.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: The model or the data cannot be read.
    """
    settings = Settings(
        eps=eps,
        norm=norm,
        confidence=confidence,
        exceed=exceed,
        seed=seed,
        time_budget=time_budget,
        input_range=input_range,
        pictures=pictures,
    )
    model, data = _only(_model(model), layer), _data(data)
    found = _examined(model, data, settings, progress)
    saved = None if witness is None else save_witness(found, Path(witness))
    return assembly.of_audit(found, data=data, layer=layer, witness=saved)


@overload
def truncate(
    model: nn.Module,
    output: None = None,
    *,
    eps: float = 1e-3,
    depth: int | None = None,
    evidence: Literal["proved", "measured"] | None = None,
    max_depth: int = MAX_DEPTH,
    data: Sequences | Calls | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    form: Literal["auto", "window", "chunk"] = "auto",
    steps: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    exceed: float | None = None,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> nn.Module: ...


@overload
def truncate(
    model: Source,
    output: str | Path,
    *,
    eps: float = 1e-3,
    depth: int | None = None,
    evidence: Literal["proved", "measured"] | None = None,
    max_depth: int = MAX_DEPTH,
    data: Sequences | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    form: FormName | Literal["auto"] = "auto",
    keep_ops: bool = False,
    steps: int | None = None,
    streaming: bool = False,
    guard: bool = False,
    opset: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    exceed: float | None = None,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report: ...


@checked
def truncate(
    model: Source, output: str | Path | None = None, **settings: Any
) -> Report | nn.Module:
    """Write the feed-forward ONNX model that replaces the recurrence, and verify it.

    Without an output, return a live module's truncated copy: see `truncate_module`, which
    also returns the report. What the report finds worse than a note, and what stays as it is,
    is then an `RnnauditWarning`, one for each finding.

    The depth rests on the strongest evidence that gives one within ``max_depth``: a proof,
    your data, synthetic inputs. A measured depth is taken at ε/2, so that inputs a little
    worse than those measured still keep ε; where verification on fresh inputs fails all
    the same, it is raised and verified again, and the layers that break ε at every depth
    tried stay as they are. A model that fails is written only where ``depth`` was given.

    Args:
        model: A loaded model, a live module, or the path of a model.
        output: Where the ONNX model goes; written whole or not at all.
        settings: Of the model that is written:

            eps: Accuracy ε that the output keeps.
            depth: Cut every recurrence to this depth, whatever the evidence.
            evidence: ``proved`` refuses anything weaker; ``measured`` passes proofs over.
            max_depth: Largest depth that is taken.
            data: As in `audit`; verification runs on them too.
            input_range: As in `audit`.
            layer: Cut only layers with a recurrence whose label contains this.
            form: How the depth is written: ``window`` runs k layers over the whole sequence,
                ``chunk`` blocks of steps side by side, each warmed up by k − 1 steps, ``last``
                the last steps only, where the graph reads no other outputs. ``auto`` takes what
                costs least; the report says which and why.
            keep_ops: Let chunk and last run ONNX's own LSTM, GRU and RNN operators.
            steps: Length of the sequences that the model will run on; without, that of the data.
            streaming: Write a model that takes a block of new steps per call and keeps the inputs
                before them in a buffer, which comes in and goes out.
            guard: Add an output that tells how far the results at depth k are from those at depth
                ⌈k/2⌉ on the inputs of each run.
            opset: Opset of the written model, 11 to 24; without, the source's, or 17.
            seed: As in `audit`.
            confidence: As in `audit`.
            exceed: As in `audit`; sequences that were set aside are left out of the verification.
            time_budget: As in `audit`.
            progress: As in `audit`.

    Returns:
        The audit's report with ``export`` and ``equivalence``; without an output, the module.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: The model or the data cannot be read.
        UnsupportedModelError: No depth has the evidence asked for, or the model holds
            something that cannot be truncated.
    """
    if output is not None:
        return _truncated_file(model, output, **settings)
    if isinstance(model, nn.Module):
        truncated, report = truncate_module(model, **settings)
        for said in _warnings(report):
            warnings.warn(said, RnnauditWarning, stacklevel=3)
        return truncated
    raise UsageError(
        f"an output must be named where the model is a {type(model).__name__}, got none",
        help="only a live nn.Module is truncated in memory",
    )


_OPTION = re.compile(r"--(?P<name>[a-z]+(-[a-z]+)*)( (?P<value>proved|measured)\b)?")


def _spoken(advice: str) -> str:
    """Turn what the command line is advised to do into arguments of Python."""
    advice = advice.replace("rnnaudit inspect MODEL --witness FILE", "audit(…, witness=FILE)")
    return _OPTION.sub(
        lambda m: f"{m['name'].replace('-', '_')}={repr(m['value']) if m['value'] else ''}", advice
    )


def _warnings(report: Report) -> Iterator[str]:
    """Say what is worse than a note, as the command line does, and what was not cut."""
    for part in report.skipped:
        if part.reason != BY_CHOICE:
            yield f"skipped {part.where}: {part.reason}"
    for same, places in grouped(report.findings):
        if same.severity != "note":
            where = f"{', '.join(places)}: " if places else ""
            yield f"{same.id} {where}{same.message}" + (
                f"; {_spoken(same.help)}" if same.help else ""
            )


@checked
def truncate_module(
    module: nn.Module,
    *,
    eps: float = 1e-3,
    depth: int | None = None,
    evidence: Literal["proved", "measured"] | None = None,
    max_depth: int = MAX_DEPTH,
    data: Sequences | Calls | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    form: Literal["auto", "window", "chunk"] = "auto",
    steps: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    exceed: float | None = None,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, Report]:
    """Replace every nn.RNN, nn.GRU and nn.LSTM inside a module by one that sees k inputs.

    The copy takes the same inputs and gives the same outputs and state_dict keys; gradients
    flow, and `torch.export` and `torch.compile` take any length of time. Depths rest on the
    strongest evidence, as in `truncate`; where the rest of the module amplifies errors so that
    its own outputs err by more than ε on the data, they are raised.

    Args:
        module: The module; it is not changed.
        eps: Accuracy ε that the outputs keep, those of the whole module on the data.
        depth: Cut every recurrence to this depth, whatever the evidence.
        evidence: As in `truncate`.
        max_depth: Largest depth that is taken.
        data: Sequences as in `audit`, those of one length given to the module as one batch;
            or what it is called with: the tuple of arguments of one call, or a list of such.
            Without, each recurrence is measured and compared on synthetic inputs of its own.
        input_range: Bounds of what the recurrences read that proofs assume; without, the box of
            what they read on the data, or |x| ≤ 1.
        layer: Cut only layers with a recurrence whose label contains this.
        form: ``window``: k layers over all steps at once; ``chunk``, which is also ``auto``:
            blocks of steps side by side in the batch, each warmed up by k − 1 steps, in
            PyTorch's own fused kernel, or without recurrent operators in a graph.
        steps: Length of the sequences that the module will run on; without, that of the data.
        seed: As in `audit`.
        confidence: As in `audit`.
        exceed: As in `audit`.
        time_budget: As in `audit`.
        progress: As in `audit`.

    Returns:
        The truncated copy, and the audit's report with ``equivalence``.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: The module does not run on the data.
        UnsupportedModelError: It holds no recurrence with a depth on the evidence asked for, or
            no depth tried keeps ε.
    """
    settings = Settings(
        eps=eps,
        confidence=confidence,
        exceed=exceed,
        seed=seed,
        time_budget=time_budget,
        input_range=input_range,
    )
    _check_counts(depth=depth, max_depth=max_depth, steps=steps)
    model = _only(load(module), layer)
    calls = _calls(module, data)
    if calls:
        read, begun = swap.read_by(module, model, calls)
        described = f"{counted(len(calls), 'call')} of the module"
        seen = observe_rows(model, read, described, seed=seed, input_range=input_range)
        seen = replace(seen, findings=(*seen.findings, *begun))
    else:
        seen = observe(model, None, seed=seed, input_range=input_range)
    found = examine(model, seen, settings, progress=progress)
    wanted = Wanted(eps, max_depth, evidence, layer or "", swap.obstacles(model))
    order, kept = swap.candidates(found, wanted, depth)
    shape = Shape(form, keep_ops=form != "window", steps=steps)
    done = swap.first_to_pass(module, found, order, calls, shape=shape, progress=progress)
    audited = assembly.of_audit(found, data=None, layer=layer)
    report = assembly.of_truncation(
        found, audited, done.plan, kept=kept, judged=done.judged, written=None
    )
    report = replace(report, settings={**report.settings, "cut": dict(done.plan.depths)})
    if depth is None and not done.judged.passed:
        raise UnsupportedModelError(
            f"the truncated module must agree within ε = {eps:g}, got an error of "
            f"{done.judged.required_eps or done.judged.reason} at depth "
            f"{max(done.plan.depths.values())}",
            help="raise eps, or choose with depth",
            id="RA303",
        )
    return done.module, report


def _truncated_file(
    model: Source,
    output: str | Path,
    *,
    eps: float = 1e-3,
    depth: int | None = None,
    evidence: Literal["proved", "measured"] | None = None,
    max_depth: int = MAX_DEPTH,
    data: Sequences | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    form: FormName | Literal["auto"] = "auto",
    keep_ops: bool = False,
    steps: int | None = None,
    streaming: bool = False,
    guard: bool = False,
    opset: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    exceed: float | None = None,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the model: see `truncate`."""
    from rnnaudit import export

    settings = Settings(
        eps=eps,
        confidence=confidence,
        exceed=exceed,
        seed=seed,
        time_budget=time_budget,
        input_range=input_range,
    )
    _check_counts(depth=depth, max_depth=max_depth, steps=steps)
    if opset is not None:
        export.check_opset(opset)
    model, data = _only(_model(model), layer), _data(data)
    if Path(output).exists() and model.path.exists() and model.path.samefile(output):
        raise UsageError(
            f"the output must not be the model that is read, got {output} for both",
            help="choose another name",
            id="RA003",
        )
    with tempfile.TemporaryDirectory(prefix="rnnaudit-") as folder:
        conversion.check(model, opset, Path(folder) / "converted.onnx", eps=eps, seed=seed)
    found = _examined(model, data, settings, progress)
    obstacles = export.obstacles(model, streaming=streaming)
    wanted = Wanted(eps, max_depth, evidence, layer or "", obstacles)
    shape = Shape(form, keep_ops, steps, opset, guard, streaming)
    aside = set_aside(found, wanted) if depth is None else ()
    served = None if data is None else data.without(aside)
    written: Export | None = None
    with tempfile.TemporaryDirectory(prefix="rnnaudit-") as folder:
        file = Path(folder) / "candidate.onnx"
        if depth is None:
            unseen = set_aside(found, wanted, synthetic=True)
            measure = Effects(found, file, shape, served, unseen)
            candidates, kept = plans(found, wanted, measure)
        else:
            candidates = iter([chosen(found, depth, wanted)])
            kept = tuple(each for stack in found.stacks for each in wanted.stays(stack))
        tried = trial.first_to_pass(
            found, candidates, file, shape=shape, data=served, progress=progress
        )
        if depth is None and not tried.judged.passed:
            tried, lost = trial.without_failures(
                found, tried, shape=shape, data=served, progress=progress
            )
            kept += lost
        if tried.judged.passed or depth is not None:
            export.write(tried.graph, output)
            timed = steps or (trial.TIMED_STEPS if data is None else max(data.lengths))
            written = trial.describe(tried, model, Path(output), steps=timed, seed=seed)
    audited = assembly.of_audit(found, data=data, layer=layer)
    return assembly.of_truncation(
        found,
        audited,
        tried.plan,
        kept=kept,
        judged=tried.judged,
        written=written,
        aside=aside,
        forms=tried.forms.values(),
    )


@checked
def verify(
    original: Source,
    candidate: str | Path,
    *,
    eps: float = 1e-3,
    data: Sequences | None = None,
    seed: int = 0,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run two models on the same inputs and judge their largest difference against ε.

    Args:
        original: A loaded model, or the path of one.
        candidate: An ONNX file; it runs in ONNX Runtime.
        eps: Largest error that passes, per output unit.
        data: Sequences to run beside the synthetic inputs.
        seed: Of the synthetic inputs.
        time_budget: Seconds for the runs.
        progress: Called with what is being done and the share that is done.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: A file cannot be read.
        UnsupportedModelError: There is nothing to compare.
    """
    model = _model(original)
    settings = Settings(eps=eps, seed=seed, time_budget=time_budget)
    data = _data(data)
    if progress is not None:
        progress("running both models", 0.0)
    judged = compare(model, candidate, eps=eps, data=data, seed=seed, time_budget=time_budget)
    findings = () if judged.passed else contradictions(model, Path(candidate))
    return assembly.of_comparison(model, candidate, judged, settings, data=data, findings=findings)


@checked
def certify(
    model: Source,
    output: str | Path,
    *,
    eps: float = 1e-3,
    norm: Norm = "max",
    data: Sequences | None = None,
    input_range: InputRange | None = None,
    layer: str | None = None,
    seed: int = 0,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Prove how fast a model forgets, and write the proof to a file that `check` accepts.

    Args:
        model: A loaded model, or the path of one.
        output: Where the proof goes; written whole, or not at all where nothing is proved.
        eps: The ε whose depth the proofs are chosen for; the file claims others beside it.
        norm: As in `audit`.
        data: Sequences whose box is the domain, where ``input_range`` does not say it.
        input_range: As in `audit`.
        layer: Prove only stacks with a recurrence whose label contains this.
        seed: Of the searches.
        time_budget: Seconds for the searches, which end with the best that they have.
        progress: Called with what is being done and the share that is done.

    Returns:
        What the file proves: a report without measurements, and with ``proof_file`` unless
        nothing was proved.

    Raises:
        UsageError: An argument makes no sense, or the file cannot be written.
        LoadError: The model or the data cannot be read.
    """
    settings = Settings(
        eps=eps, norm=norm, seed=seed, time_budget=time_budget, input_range=input_range
    )
    model, data = _only(_model(model), layer), _data(data)
    seen = None
    if data is not None or not model.direct:
        seen = observe(model, data, seed=seed, input_range=input_range)
    document, missing = proving.prove(model, seen, settings, progress)
    raw = proving.dumped(document)
    path = Path(output)
    if not document["stacks"]:
        return checking.nothing(model, missing, eps=eps, norm=norm, seed=seed)
    found = checking.report(document, model, path=path, size=len(raw), missing=missing, seed=seed)
    try:
        path.write_bytes(raw)
    except OSError as error:
        raise UsageError(
            f"the proof must be writable, got {path}: {error.strerror}", id="RA003"
        ) from error
    return found if seen is None else replace(found, data=seen.description)


@checked
def check(certificate: str | Path, model: Source) -> Report:
    """Prove again what a file claims of a model, without the search that found it.

    Args:
        certificate: A file that `certify` wrote; nothing in it is trusted.
        model: A loaded model, or the path of one.

    Returns:
        What was proved again; ``proof_file`` says whether all of it holds, and what does not.

    Raises:
        LoadError: A file cannot be read.
    """
    return checking.check(Path(certificate), _model(model))


@checked
def replay(model: Source, witness: str | Path) -> Report:
    """Run a witness that `audit` saved again, in the model's own runtime.

    Args:
        model: A loaded model, or the path of one.
        witness: The ``.npz`` file.

    Returns:
        A report whose ``replay`` holds the distances at each depth, as found and as replayed.

    Raises:
        LoadError: A file cannot be read, or the witness speaks of another model.
        UnsupportedModelError: The model does not run on it.
    """
    model = _model(model)
    return assembly.of_replay(model, replaying.replay(model, load_witness(witness)), str(witness))


def _examined(
    model: Model, data: Data | None, settings: Settings, progress: Progress | None
) -> Examination:
    seen = observe(model, data, seed=settings.seed, input_range=settings.input_range)
    return examine(deviations.measured(model, seen.stacks), seen, settings, progress=progress)


# ----------------------------------------------------------------------------- arguments


def _model(source: Source) -> Model:
    if isinstance(source, Model):
        return source
    if isinstance(source, (str, Path, nn.Module)):
        return load(source)
    raise _no_model(source)


def _no_model(source: object) -> UsageError:
    return UsageError(
        "a model must be a path, an nn.Module or what rnnaudit.load returns, got "
        f"{type(source).__name__}",
        help="for example rnnaudit.load('model.onnx')",
    )


def _data(source: Sequences | None) -> Data | None:
    if source is None or isinstance(source, Data):
        return source
    if isinstance(source, (str, Path)):
        return load_data(str(source))
    return of_arrays(source)


def _calls(module: nn.Module, data: Sequences | Calls | None) -> list[tuple[Any, ...]]:
    if isinstance(data, tuple):
        return [data]
    if isinstance(data, list) and data and all(isinstance(call, tuple) for call in data):
        return data
    sequences = _data(data)
    return [] if sequences is None else swap.calls_of(module, sequences)


def _only(model: Model, layer: str | None) -> Model:
    """Keep the stacks that hold a recurrence whose label contains ``layer``."""
    if layer is None:
        return model
    stacks = tuple(s for s in model.stacks if any(layer in r.label for r in s.recurrences()))
    rest = [s for s in model.stacks if s not in stacks]
    if not stacks:
        names = ", ".join(r.label for r in islice(model.recurrences(), 8))
        raise UsageError(f"--layer must be part of one of {names}, got {layer!r}")
    skipped = (Skipped(s.name, BY_CHOICE) for s in rest)
    return replace(model, stacks=stacks, skipped=(*model.skipped, *skipped))


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
