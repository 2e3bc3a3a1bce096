"""Rules of an MLPerf Training BERT log as data: its keys, their order, their values, and limits.

`bert.log.mllog` writes logs according to this table, and `compliance.check.checker` checks logs against it. The table
combines the requirements of the rulesets 1.0.0 to 5.0.0, so that one log satisfies all of them.

The source of a rule is a section or a file. "TR 11" is section 11 of training_rules.adoc in mlcommons/training_policies. A
yaml file is a rule file of the compliance checker in the package mlperf-logging.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard

Division = Literal["closed", "open"]
Phase = Literal["before", "init", "ready", "run", "done"]

# 5.1.0 is excluded: it has rule files for BERT, but its package checker reports success without reading any BERT log.
RULESETS = ("1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0")
NEWEST_RULESET = RULESETS[-1]
AUTO = "auto"
"""Value that callers may pass in place of a ruleset, to select the newest ruleset that accepts the log."""
DIVISIONS: tuple[Division, ...] = ("closed", "open")
SYSTEM_STATUSES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
"""Status in a system description for each submission_status of a log."""
RUN_STATUSES = ("success", "aborted")

NOT_A_RESULT = "Not an MLPerf result: not reviewed and not verified by MLCommons."
"""Notice that accompanies all output about runs of this repository (TR 1)."""
UNOFFICIAL = "Unofficial: computed from the logs by this program. MLCommons publishes the official results."
"""Notice that accompanies all output about logs of other software, which may belong to published results."""

QUALITY_TARGET = 0.720
"""Masked-LM accuracy that ends a closed run, as a fraction (TR 24.2)."""

SUBMISSION_RUNS = 10
"""Number of runs in a BERT submission (TR 12)."""

EVAL_SAMPLES = 10_000
"""Number of sequences of the evaluation set. Every evaluation must use all of them (TR 24.1, 6.3)."""

INIT_LIMIT_MINUTES: dict[Division, int] = {"closed": 30, "open": 240}
"""Limit of the untimed initialisation in minutes since ruleset 2.0.0 (TR 11). Before, it was 30 in both divisions."""

MAX_TRAINED = 100_000_000
"""Upper limit for sequences in a closed run. The reference needs at most 5.5 million, and the data set has 156 million."""

FIRST_MS, LAST_MS = 1_514_764_800_000, 4_102_444_800_000
"""Range of time_ms: from 2018, when the benchmark was founded, to the end of this century."""

PLAUSIBLE: dict[str, tuple[float, float]] = {
    "global_batch_size": (1, 100_000),
    "opt_base_learning_rate": (1e-6, 0.1),
    "opt_epsilon": (1e-20, 0.01),
    "opt_lamb_epsilon": (1e-20, 0.01),
    "opt_lamb_weight_decay_rate": (1e-6, 1),
    "opt_learning_rate_training_steps": (10, 1e7),
    "eval_accuracy": (0, 0.8),
}
"""Plausible range of each number above 0 in a closed run. Published runs stay well within these ranges."""

MIN_RATE, MAX_RATE = 0.1, 1e7
"""Range of sequences per second of a closed run. Published runs have 90 to 760,000."""
MAX_ACCELERATOR_RATE = 1e4
"""Largest plausible number of sequences per second of one accelerator. Published runs stay below a fifth of it."""

FIXED_SETTINGS: dict[str, int | float] = {
    "opt_gradient_clip_norm": 1.0,
    "opt_lamb_learning_rate_decay_poly_power": 1.0,
    "max_sequence_length": 512,
    "max_predictions_per_seq": 76,
}
"""Settings that a closed run must take from the reference implementation (TR 9.1, 24.3)."""

PHASE_NAMES: dict[Phase, str] = {
    "before": "before init_start",
    "init": "between init_start and init_stop",
    "ready": "between init_stop and run_start",
    "run": "between run_start and run_stop",
    "done": "after run_stop",
}

NEXT_PHASE: dict[str, Phase] = {"init_start": "init", "init_stop": "ready", "run_start": "run", "run_stop": "done"}
"""Phase that each of these four records begins. The records must be logged in this order."""


@dataclass(frozen=True)
class ValueRule:
    """A rule for a value: a predicate, and its description for messages."""

    wording: str
    accepts: Callable[[object], bool] = field(repr=False, compare=False)


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether `value` is an int of at most 64 bits and not a bool."""
    # Reject longer integers, which JSON may contain, because they overflow in arithmetic with floats.
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether `value` is an int of at most 64 bits or a finite float."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _one_of(*choices: str) -> ValueRule:
    wording = " or ".join(repr(choice) for choice in choices) + (" (lower case)" if len(choices) > 1 else "")
    return ValueRule(wording, lambda value: value in choices)


def _number(wording: str, accepts: Callable[[int | float], bool]) -> ValueRule:
    return ValueRule(wording, lambda value: is_number(value) and accepts(value))


# Accept 128 bits: seeds from /dev/urandom have 64 unsigned bits, and seeds from NumPy have 128.
SEED = ValueRule(
    "an integer of at most 128 bits",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 128,
)
COUNT = ValueRule("an integer >= 0", lambda value: is_integer(value) and value >= 0)
POSITIVE_INTEGER = ValueRule("an integer > 0", lambda value: is_integer(value) and value > 0)
# Accept floats such as 1024.0, because published logs contain them as step counts.
STEP = _number("a whole number", lambda value: value == int(value))
STEPS = _number("a whole number >= 0", lambda value: value == int(value) and value >= 0)
POSITIVE_STEPS = _number("a whole number > 0", lambda value: value == int(value) and value > 0)
NON_NEGATIVE = _number("a number >= 0", lambda value: value >= 0)
POSITIVE = _number("a number > 0", lambda value: value > 0)
DECAY = _number("a number from 0 up to, not including, 1", lambda value: 0 <= value < 1)
FRACTION = _number("a fraction from 0 to 1", lambda value: 0 <= value <= 1)
TEXT = ValueRule("text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
PRESENT = ValueRule("a value", lambda value: value is not None)

ALL = frozenset(RULESETS)
NONE: frozenset[str] = frozenset()


def _until(ruleset: str) -> frozenset[str]:
    return frozenset(RULESETS[: RULESETS.index(ruleset) + 1])


def init_limit_minutes(ruleset: str, division: Division) -> int:
    """Return the minutes that the untimed initialisation must stay below."""
    return INIT_LIMIT_MINUTES["closed" if ruleset in ONE_INIT_LIMIT else division]


ONE_INIT_LIMIT = _until("1.1.0")
"""Rulesets in which both divisions have the closed division's time limit of the initialisation."""


@dataclass(frozen=True)
class KeyRule:
    """Rule for one key of the log.

    Attributes:
        phases: phases of the log in which the record is allowed.
        once: whether the log may have only one record of the key.
        value: rule for the value; None if the value has no meaning.
        metadata: required metadata fields, each with its rule.
        closed, open: rulesets in which a log of the closed or the open division must contain the key.
        advised: rulesets in which a log should contain the key, but need not.
        written: whether this repository's writer requires the key in every log, before the clock starts.
        source: document that states the rule.
    """

    key: str
    event_type: Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
    phases: tuple[Phase, ...]
    source: str
    once: bool = True
    value: ValueRule | None = None
    metadata: tuple[tuple[str, ValueRule], ...] = ()
    closed: frozenset[str] = ALL
    open: frozenset[str] = ALL
    advised: frozenset[str] = NONE
    written: bool = True

    def required_in(self, ruleset: str, division: Division) -> bool:
        return ruleset in (self.closed if division == "closed" else self.open)

    def decides_in(self, ruleset: str, division: Division) -> bool:
        """Tell whether a log that breaks this rule fails. It does if `ruleset` or no ruleset at all requires the key."""
        required = self.closed if division == "closed" else self.open
        return not required or ruleset in required


def _setting(
    key: str,
    value: ValueRule,
    source: str = "closed_bert.yaml; TR 24.3",
    *,
    closed: frozenset[str] = ALL,
    open: frozenset[str] = NONE,
    advised: frozenset[str] = NONE,
    written: bool = True,
) -> KeyRule:
    """Return the rule for a setting. It is logged once during initialisation. By default, closed logs must contain it."""
    return KeyRule(
        key, "POINT_IN_TIME", ("init",), source, value=value, closed=closed, open=open, advised=advised, written=written
    )


def _optional(key: str, value: ValueRule) -> KeyRule:
    return _setting(key, value, "TR 9.1", closed=NONE, written=False)


def _span(
    name: str, start: tuple[tuple[str, ValueRule], ...], stop: str, *, required: frozenset[str]
) -> tuple[KeyRule, KeyRule]:
    opening = KeyRule(f"{name}_start", "INTERVAL_START", ("run",), "common.yaml", once=False, metadata=start)
    opening = replace(opening, closed=required, open=required)
    closing = replace(opening, key=f"{name}_stop", event_type="INTERVAL_END", metadata=((stop, COUNT),))
    return opening, closing


_STATUS = _one_of(*SYSTEM_STATUSES)
# The rule files accept any status, but the RCP checker treats only "success" as converged.
_RUN_STATUS = (("status", _one_of(*RUN_STATUSES)),)
_BLOCK = (("first_epoch_num", COUNT), ("epoch_count", POSITIVE_INTEGER))
_EPOCH = (("epoch_num", COUNT),)

_RULES = (
    KeyRule("cache_clear", "POINT_IN_TIME", ("before", "init"), "common.yaml; TR 6.1", once=False, value=PRESENT),
    KeyRule("init_start", "INTERVAL_START", ("before", "init"), "common.yaml; TR 11", once=False),
    _setting("submission_benchmark", _one_of("bert"), "closed_common.yaml, open_common.yaml", open=ALL),
    _setting("submission_division", _one_of(*DIVISIONS), "common.yaml; TR 4", open=ALL),
    _setting("submission_org", TEXT, "common.yaml up to 4.1.0", closed=_until("4.1.0"), open=_until("4.1.0")),
    _setting("submission_platform", TEXT, "common.yaml up to 4.1.0", closed=_until("4.1.0"), open=_until("4.1.0")),
    _setting("submission_status", _STATUS, "common.yaml up to 4.0.0", closed=_until("4.0.0"), open=_until("4.0.0")),
    # TR 5.1 requires the seed since round 4.1.
    _setting("seed", SEED, "seed checker of the package checker; TR 5.1", advised=_until("4.0.0")),
    _setting("global_batch_size", POSITIVE_INTEGER),
    _setting("gradient_accumulation_steps", POSITIVE_INTEGER, "closed_common.yaml"),
    _setting("opt_base_learning_rate", POSITIVE),
    # The rule file of 2.1.0 renamed this setting, so a log that satisfies all rulesets contains both names.
    _setting("opt_epsilon", POSITIVE, closed=_until("2.0.0")),
    _setting("opt_lamb_epsilon", POSITIVE, closed=ALL - _until("2.0.0")),
    _setting("opt_lamb_beta_1", DECAY),
    _setting("opt_lamb_beta_2", DECAY),
    _setting("opt_lamb_weight_decay_rate", NON_NEGATIVE),
    _setting("opt_learning_rate_training_steps", POSITIVE_STEPS),
    _setting("opt_learning_rate_warmup_steps", STEPS),
    _setting("num_warmup_steps", STEPS),
    # This step may be negative, because some reference convergence points start warm-up before the first step.
    _setting("start_warmup_step", STEP),
    # Runs of the open division may have no target.
    _setting("quality_target", FRACTION, "TR 24.2", closed=NONE, written=False),
    _setting("eval_interval_samples", POSITIVE_INTEGER, "TR 24.4", closed=NONE),
    _optional("opt_name", TEXT),
    _optional("opt_gradient_clip_norm", POSITIVE),
    _optional("opt_lamb_learning_rate_decay_poly_power", POSITIVE),
    _optional("max_sequence_length", POSITIVE_INTEGER),
    _optional("max_predictions_per_seq", POSITIVE_INTEGER),
    _optional("d_batch_size", POSITIVE_INTEGER),
    KeyRule(
        "weights_initialization",
        "POINT_IN_TIME",
        ("init",),
        "closed_bert.yaml 1.1.0 to 2.1.0",
        once=False,
        metadata=(("tensor", TEXT),),
        closed=_until("2.1.0") - {"1.0.0"},
        open=NONE,
    ),
    KeyRule("init_stop", "INTERVAL_END", ("init",), "common.yaml; TR 11"),
    KeyRule("run_start", "INTERVAL_START", ("ready",), "common.yaml; TR 11"),
    # Logs of other software may contain epochs instead of blocks.
    *_span("epoch", _EPOCH, "epoch_num", required=NONE),
    *_span("block", _BLOCK, "first_epoch_num", required=ALL),
    *_span("eval", _EPOCH, "epoch_num", required=NONE),
    KeyRule(
        "eval_accuracy",
        "POINT_IN_TIME",
        ("run",),
        "closed_bert.yaml, open_bert.yaml; TR 24.6",
        once=False,
        value=FRACTION,
        metadata=_EPOCH,
    ),
    KeyRule("train_samples", "POINT_IN_TIME", ("run", "done"), "common.yaml", value=STEPS),
    KeyRule("eval_samples", "POINT_IN_TIME", ("run", "done"), "common.yaml; TR 6.3", value=STEPS),
    KeyRule("run_stop", "INTERVAL_END", ("run",), "common.yaml; TR 11", metadata=_RUN_STATUS),
)

KEYS: dict[str, KeyRule] = {rule.key: rule for rule in _RULES}
"""Rules of all known keys, in the order in which this repository's writer logs them."""

SETTINGS = tuple(key for key, rule in KEYS.items() if rule.phases == ("init",) and rule.once and rule.value)
"""Keys that are logged with a value, once, during initialisation."""

INTERVALS = {key: key.replace("_start", "_stop") for key, rule in KEYS.items() if rule.event_type == "INTERVAL_START"}
"""Maps the key of the opening record of each interval to the key of its closing record."""

# Since ruleset 3.1.0, a single count of steps or samples may replace the epoch fields.
_COUNTED_BY = {"3.1.0": "step_num", "4.0.0": "samples_count", "4.1.0": "samples_count", "5.0.0": "samples_count"}


def alternative_metadata(key: str, ruleset: str) -> str | None:
    """Return the field that may replace all required metadata of a block, epoch or evaluation; None if there is none."""
    name, _, end = key.partition("_")
    has_one = name in ("block", "eval") or (name == "epoch" and ruleset == "5.0.0")
    return _COUNTED_BY.get(ruleset) if has_one and end in ("start", "stop") else None


PER_RANK = frozenset({"cache_clear", "init_start"})
"""Keys that every process may log. Their times are not ordered across processes."""


def weight_tensors(num_hidden_layers: int) -> tuple[str, ...]:
    """Return the weight names of the reference's TensorFlow checkpoint: 14 plus 16 per layer, 398 for BERT-Large."""

    def dense(*scopes: str) -> list[str]:
        return [f"{scope}/{name}" for scope in scopes for name in ("kernel", "bias")]

    def layer_norm(scope: str) -> list[str]:
        return [f"{scope}/LayerNorm/gamma", f"{scope}/LayerNorm/beta"]

    names = [f"bert/embeddings/{table}_embeddings" for table in ("word", "position", "token_type")]
    names += layer_norm("bert/embeddings")
    for layer in range(num_hidden_layers):
        scope = f"bert/encoder/layer_{layer}"
        names += dense(*(f"{scope}/attention/self/{projection}" for projection in ("query", "key", "value")))
        names += dense(f"{scope}/attention/output/dense") + layer_norm(f"{scope}/attention/output")
        names += dense(f"{scope}/intermediate/dense", f"{scope}/output/dense") + layer_norm(f"{scope}/output")
    names += [*dense("bert/pooler/dense"), "cls/predictions/output_bias"]
    names += dense("cls/predictions/transform/dense") + layer_norm("cls/predictions/transform")
    return (*names, "cls/seq_relationship/output_weights", "cls/seq_relationship/output_bias")


def check_ruleset(ruleset: str) -> None:
    """Raise ``ValueError`` if BERT cannot be checked under this ruleset."""
    if ruleset not in RULESETS:
        raise ValueError(
            f"ruleset is {ruleset!r}, expected one of {', '.join(RULESETS)}: "
            "BERT left the benchmark after 5.0.0, and later checkers skip it without reading the log"
        )


SYSTEM_FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node",
    "host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count",
    "host_processor_frequency", "host_processor_caches", "host_processor_interconnect", "host_memory_capacity",
    "host_storage_type", "host_storage_capacity", "host_networking", "host_networking_topology",
    "host_memory_configuration", "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect",
    "accelerator_frequency", "accelerator_on-chip_memories", "accelerator_memory_configuration",
    "accelerator_memory_capacity", "accelerator_interconnect", "accelerator_interconnect_topology", "cooling",
    "hw_notes", "framework", "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""Fields that the system description checker requires."""

SYSTEM_INTEGERS = {
    "number_of_nodes": (1, 100_000),
    "host_processors_per_node": (1, 64),
    "accelerators_per_node": (0, 1024),
}
"""Fields whose numeric strings the result summarizer converts to integers, with the range that a system can have."""

# This pattern is stricter than the package checker's pattern result_*.txt, which accepts any text as the number.
RESULT_FILE = re.compile(r"result_(\d+)\.txt")
"""Name of a run's log in results/<system>/bert (submission rules, "Directory structure")."""
