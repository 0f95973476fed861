"""Every finding and refusal has an identity (``RA…``) that never changes meaning.

RA0xx usage · RA1xx loading · RA2xx stability and memory · RA3xx truncation and
equivalence · RA9xx our own faults. An id that is retired is never given out again.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from rnnaudit.results import Finding, Severity


class Known(NamedTuple):
    """What an id stands for: one line of title, and what its reader can do."""

    id: str
    severity: Severity
    title: str
    help: str


FINDINGS: tuple[Known, ...] = (
    Known(
        "RA001",
        "error",
        "An option or argument makes no sense, whatever the file",
        "rnnaudit COMMAND --help lists the options, their units and examples",
    ),
    Known(
        "RA002",
        "error",
        "The configuration holds a key or a value that is not understood",
        "keys of [tool.rnnaudit] are the long options without their dashes, and `model`",
    ),
    Known(
        "RA003",
        "error",
        "The output cannot be written",
        "name a file in a folder that exists and that you may write to",
    ),
    Known(
        "RA100",
        "error",
        "The model could not be audited",
        "the message says what was wanted and what came",
    ),
    Known(
        "RA101",
        "error",
        "The file is missing, damaged, or of a kind that is not read",
        "give a PyTorch state_dict (.pt, .pth) or an ONNX model (.onnx)",
    ),
    Known(
        "RA102",
        "error",
        "The file holds something that cannot be audited honestly",
        "the message names the construct; without it the rest can be audited",
    ),
    Known(
        "RA103",
        "error",
        "The pickle needs code to be read, and nothing is unpickled",
        "save a state_dict: torch.save(model.state_dict(), path)",
    ),
    Known(
        "RA104",
        "error",
        "Weights are NaN or infinite",
        "such a model has no memory to measure; take an earlier checkpoint",
    ),
    Known(
        "RA105",
        "error",
        "No recurrence was found",
        "the report says what was looked at",
    ),
    Known(
        "RA107",
        "error",
        "The data cannot be used",
        "give sequences [T, F] of finite numbers; --time-axis and --batch-axis name the axes",
    ),
    Known(
        "RA110",
        "warning",
        "ONNX Runtime and the operator's text clip an LSTM differently",
        "ONNX Runtime is followed; other runtimes may give other outputs",
    ),
    Known(
        "RA111",
        "warning",
        "An activation's alpha or beta is missing, and runtimes disagree",
        "write activation_alpha and activation_beta into the node",
    ),
    Known(
        "RA112",
        "warning",
        "A node is batch first (layout = 1): ONNX Runtime does not run it",
        "export with layout = 0 and transposes around it",
    ),
    Known(
        "RA113",
        "warning",
        "A recurrent node takes sequence lengths",
        "audited as if every sequence had full length; padding is not part of the audit",
    ),
    Known(
        "RA114",
        "note",
        "The batch size is fixed by an initial state stored in the model",
        "export without an initial state for a free batch size",
    ),
    Known(
        "RA115",
        "warning",
        "An initial state is computed inside the model: zero is assumed",
        "depths hold for runs that start from zero",
    ),
    Known(
        "RA120",
        "note",
        "The file holds several copies of a recurrence, and one was read",
        "save the copy you mean on its own to audit that one",
    ),
    Known(
        "RA121",
        "warning",
        "An Elman cell's nonlinearity is not stored here: tanh is assumed",
        "if the model was made with nonlinearity='relu', export it to ONNX, which says so",
    ),
    Known(
        "RA122",
        "note",
        "What follows the recurrence is not one linear layer: not audited",
        "errors are those of the recurrent output; export the model to ONNX to audit it whole",
    ),
    Known(
        "RA123",
        "warning",
        "The model may have learned its initial state: zero is assumed",
        "export the model to ONNX, where the initial state is wired to the recurrence",
    ),
    Known(
        "RA124",
        "note",
        "The model keeps its state between calls",
        "audited as if every sequence began from zero; reset the state before each sequence",
    ),
    Known(
        "RA125",
        "warning",
        "Dropout is active: the file was made in training mode",
        "call model.eval() before the export; the audit is of the model without dropout",
    ),
    Known(
        "RA126",
        "note",
        "The export fixed the number of time steps",
        "export with a dynamic time axis where the file itself has to run on other lengths",
    ),
    Known(
        "RA127",
        "warning",
        "A recurrence is quantised: its dequantised weights are audited",
        "truncate the model as it was before quantisation, and quantise the result",
    ),
    Known(
        "RA128",
        "note",
        "A live module does more than its recurrence and one linear layer",
        "errors are those of the recurrent output; export the model to ONNX to audit it whole",
    ),
    Known(
        "RA130",
        "note",
        "A recurrence was read from operators, not from one node",
        "the message says what it carries and reads; check that against the model's own code",
    ),
    Known(
        "RA131",
        "warning",
        "A state is kept unchanged where a mask says so",
        "steps that are masked forget nothing: count steps that are not, or cut them out before",
    ),
    Known(
        "RA132",
        "error",
        "The proof file is missing, damaged, or of another kind",
        "give a file that rnnaudit certify wrote",
    ),
    Known(
        "RA133",
        "warning",
        "A GRU resets its state unlike the model that it comes from",
        "the file's own equation is audited; PyTorch's is linear_before_reset = 1",
    ),
    Known(
        "RA202",
        "warning",
        "The model remembers longer than the data last",
        "give longer sequences, or keep the recurrence",
    ),
    Known(
        "RA203",
        "warning",
        "Few sequences: the confidence statement is weak",
        "give more sequences: at 95 % confidence, 59 bound the exceedance by 5 %",
    ),
    Known(
        "RA204",
        "warning",
        "The sequences are shorter than twice the measured depth",
        "give sequences of at least 2k steps",
    ),
    Known(
        "RA205",
        "note",
        "Measured on synthetic inputs",
        "give your own with --data: the depth holds for inputs like those it was measured on",
    ),
    Known(
        "RA206",
        "warning",
        "The cell state still drifts at the end of the data",
        "give longer sequences: a state that grows has not shown its memory yet",
    ),
    Known(
        "RA207",
        "note",
        "The data were given to one of several stacks",
        "choose another with --layer",
    ),
    Known(
        "RA208",
        "warning",
        "The time budget ended the search early",
        "raise --time-budget; numbers of this run may differ from those of the next",
    ),
    Known(
        "RA209",
        "warning",
        "The state becomes infinite or NaN on some sequences",
        "check the range of the inputs; a cell that diverges has no truncation",
    ),
    Known(
        "RA210",
        "warning",
        "A recurrence was not measured on what it sees",
        "its numbers hold for synthetic inputs only; give --data of the graph's own kind",
    ),
    Known(
        "RA211",
        "warning",
        "Some kinds of synthetic input are remembered longer than others",
        "give --data: what your inputs are like decides the depth",
    ),
    Known(
        "RA212",
        "note",
        "Only some rows of a layer's batch axis were measured",
        "give fewer or shorter sequences to measure all rows of each",
    ),
    Known(
        "RA213",
        "error",
        "The certificate does not prove what it claims of this model",
        "certify the model again; a certificate fits one set of weights, to the last bit",
    ),
    Known(
        "RA214",
        "warning",
        "ε is below what float64 tells apart",
        "a depth for it can be proved, not measured: raise --eps to measure one",
    ),
    Known(
        "RA215",
        "note",
        "ε is below what float32 alone changes",
        "the depth holds in exact arithmetic: raise --eps, or run the model in float64",
    ),
    Known(
        "RA216",
        "warning",
        "The time budget ended a search or a norm",
        "raise --time-budget: what was found holds, and what was not found may exist",
    ),
    Known(
        "RA230",
        "error",
        "The verdict is weaker than the policy requires",
        "narrow --input-range, or gate on your data with --max-depth and --evidence measured",
    ),
    Known(
        "RA231",
        "error",
        "λ exceeds the policy's limit, or is not proved to keep it",
        "narrow --input-range, train with a smaller recurrent norm, or raise the limit",
    ),
    Known(
        "RA232",
        "error",
        "The depth exceeds the limit, or lacks the evidence asked for",
        "give --data, raise --eps or --max-depth, or accept weaker --evidence",
    ),
    Known(
        "RA233",
        "error",
        "More sequences may exceed ε than accepted",
        "give more sequences with --data",
    ),
    Known(
        "RA234",
        "error",
        "Part of the model was skipped, which the policy does not accept",
        "each part says why; --allow-skipped accepts a model that was audited in part",
    ),
    Known(
        "RA235",
        "error",
        "The model is worse than the baseline",
        "see what changed; where it is meant, write the baseline again",
    ),
    Known(
        "RA236",
        "error",
        "An allowance of the policy has expired",
        "mend the finding, or decide again and give the allowance a new date",
    ),
    Known(
        "RA237",
        "error",
        "The witness is missing, damaged, or of another model",
        "rnnaudit inspect MODEL --witness FILE saves one",
    ),
    Known(
        "RA238",
        "note",
        "The witness was found in other weights than these",
        "it says of this model what its replay shows, and no more",
    ),
    Known(
        "RA239",
        "note",
        "No proof of contraction can exist: states move apart somewhere",
        "a measured depth may still hold on your data; a proof for every input may not",
    ),
    Known(
        "RA240",
        "warning",
        "Two fixed points attract under the same input: one past is kept",
        "no depth holds for every input; rnnaudit inspect MODEL --witness FILE saves the inputs",
    ),
    Known(
        "RA241",
        "warning",
        "The state grows without bound under a constant input",
        "bound the inputs, or clip the state: a cell that diverges has no truncation",
    ),
    Known(
        "RA301",
        "warning",
        "The depth rests on evidence weaker than a proof",
        "--evidence proved refuses anything weaker",
    ),
    Known(
        "RA302",
        "error",
        "No depth within --max-depth has the evidence asked for",
        "raise --eps or --max-depth, give --data, or name a depth with --depth",
    ),
    Known(
        "RA303",
        "error",
        "The candidate differs from the original by more than ε",
        "take the smallest ε that passes, or a larger depth",
    ),
    Known(
        "RA304",
        "error",
        "The two models could not be compared",
        "the message says which run failed; nothing compared is never a pass",
    ),
    Known(
        "RA305",
        "warning",
        "A counterexample to the chosen depth is known",
        "rnnaudit inspect MODEL --witness FILE saves it; see that your inputs are unlike it",
    ),
    Known(
        "RA306",
        "warning",
        "The depth does not serve sequences that were set aside",
        "without --exceed every sequence counts",
    ),
    Known(
        "RA307",
        "note",
        "The recurrence is the faster choice here",
        "keep the recurrence where speed is all you want; longer sequences (--steps) favour a cut",
    ),
    Known(
        "RA900",
        "error",
        "rnnaudit itself failed",
        "please report the traceback; no statement about the model is made",
    ),
)


def known(id: str) -> Known:  # noqa: A002
    """Return what an id stands for.

    Raises:
        KeyError: No such id was ever given out.
    """
    return {finding.id: finding for finding in FINDINGS}[id]


def finding(id: str, where: str, message: str) -> Finding:  # noqa: A002
    """Make a finding with the severity and the help that its identity has.

    Raises:
        KeyError: No such id was ever given out.
    """
    what = known(id)
    return Finding(id, what.severity, where, message, what.help)


def page(id: str) -> str:  # noqa: A002
    """Return the page of a finding, as Markdown: its title, then what `explain` prints of it.

    Raises:
        KeyError: No such id was ever given out.
    """
    what = known(id)
    text = (files("rnnaudit") / "findings_pages" / f"{id}.md").read_text("utf-8")
    return f"# {id} ({what.severity}): {what.title}\n\n{text}"
