"""The user's ``custom_mpi_options``: read as data, so that they can be checked before a cluster is paid for.

Open MPI takes an option with one dash or two, parameters of its components as ``--mca NAME VALUE``, and
variables for the ranks as ``-x NAME=VALUE``. All three become :class:`MpiOption` with one spelling.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from smp_config.errors import ConfigError, show_value
from smp_config.formats import strict_json
from smp_config.formats.secrets import mask_secrets, masked_text

#: Characters of all options; one word of a command line may have 131,072 bytes.
_LONGEST = 32_768

#: Options that set one parameter of a component: two words follow.
_PARAMETER_OPTIONS = frozenset({"mca", "gmca", "pmixmca", "gpmixmca", "prtemca", "omca"})

#: The option that hands a variable to the ranks.
_VARIABLE_OPTION = "x"

#: A variable that the training toolkit takes as an option of mpirun's, as published examples write it.
_TOOLKIT_VARIABLE = "NCCL_DEBUG"

#: Options that take no word. Whatever is neither here nor above takes the next word when that is not an option.
_FLAGS = frozenset(
    """allow-run-as-root bind-to-core bind-to-none bind-to-socket bycore bynode byslot continuous debug-daemons
    debug-daemons-file display-allocation display-devel-allocation display-devel-map display-map display-topo
    do-not-launch do-not-resolve enable-recovery forward-signals get-stack-traces h help index-argv-by-rank
    leave-session-attached merge-stderr-to-stdout nolocal nooversubscribe nousage-of-slots novm oversubscribe
    pernode q quiet report-bindings report-child-jobs-separately report-state-on-timeout show-progress staged
    tag-output timestamp-output use-hwthread-cpus v V verbose version xml""".split()
)

#: Options that the job's own settings decide, each with the setting to change instead.
_RESERVED = {
    **dict.fromkeys(("np", "n", "c", "npernode", "N", "ppr", "pernode"), 'distribution["mpi"]["processes_per_host"]'),
    **dict.fromkeys(
        ("host", "H", "hostfile", "machinefile", "default-hostfile", "add-host", "add-hostfile"),
        "instance_count",
    ),
    **dict.fromkeys(("app", "wdir", "wd"), "entry_point and source_dir"),
}

#: What would put something else before the lines of the ranks than their number, or take the lines elsewhere.
_OUTPUT_OPTIONS = frozenset(
    "merge-stderr-to-stdout output-directory output-filename output-proctable timestamp-output xml xml-file xterm".split()
)
_OUTPUT_PARAMETERS = frozenset(["orte_timestamp_output", "orte_output_filename", "orte_xml_output", "orte_xml_file"])


@dataclass(frozen=True)
class MpiOption:
    """One option of mpirun.

    Attributes:
        name: without dashes, e.g. ``bind-to``, ``mca``, ``x``.
        key: what it sets: the parameter of ``mca``, the variable of ``x``, else empty.
        value: the value, or None for a flag and for ``-x NAME``, which hands on the launcher's own value.
    """

    name: str
    key: str = ""
    value: str | None = None

    @property
    def subject(self) -> tuple[str, str]:
        """Return the subject of the option; two options of one subject set the same thing."""
        return self.name, self.key

    def arguments(self) -> list[str]:
        """Return the command-line words of the option; all versions of Open MPI accept two dashes."""
        dashed = f"-{self.name}" if len(self.name) == 1 else f"--{self.name}"
        if self.name == _VARIABLE_OPTION:
            return [dashed, self.key if self.value is None else f"{self.key}={self.value}"]
        return [dashed, *filter(None, [self.key]), *([] if self.value is None else [self.value])]

    def __str__(self) -> str:
        """Return the option for messages, with values that look like secrets masked."""
        if self.name == _VARIABLE_OPTION and self.value is not None:
            return f"-x {self.key}={shlex.quote(mask_secrets(self.key, self.value))}"
        return masked_text(shlex.join(self.arguments()))


@dataclass(frozen=True)
class MergedOptions:
    """Defaults and custom options as one list.

    Attributes:
        options: each subject once; custom ones in the order given, after the defaults that remain.
        replaced: pairs (default, custom) where the custom option won with another value.
        conflicts: for every subject that the custom options set to different values, those options.
    """

    options: tuple[MpiOption, ...]
    replaced: tuple[tuple[MpiOption, MpiOption], ...] = ()
    conflicts: tuple[tuple[MpiOption, ...], ...] = field(default=())

    def arguments(self) -> list[str]:
        """Return the command-line words of all options."""
        words = []
        for option in self.options:
            words += option.arguments()
        return words

    def raise_for_conflicts(self) -> None:
        """Raise ConfigError, naming each with its values, for options given twice with different values."""
        if not self.conflicts:
            return
        given = "; ".join(" and ".join(f"'{option}'" for option in group) for group in self.conflicts)
        first = self.conflicts[0]
        raise ConfigError(
            f"custom_mpi_options sets the same thing to different values: {given}; mpirun would take one of them "
            f"without a word; keep one, for example '{first[-1]}', and remove the other",
            code="SMP104",
        )


def parse_mpi_options(text: str) -> list[MpiOption]:
    """Read options as a shell would.

    Args:
        text: e.g. ``"-verbose --mca btl_vader_single_copy_mechanism none -x NCCL_DEBUG=INFO"``.

    Returns:
        The options in their order, repetitions included.

    Raises:
        ConfigError: an open quote, a word that belongs to no option, a missing value, an option that the
            job's own settings decide (the number of processes, the hosts, the program), or one that marks or moves
            the output, which the launcher reads.
    """
    if why := strict_json.why_unusable(text or ""):
        raise ConfigError(
            f"custom_mpi_options {why}; it begins with {text[:60]!r}: remove that character", code="SMP104"
        )
    if len(text or "") > _LONGEST:
        raise ConfigError(
            f"custom_mpi_options has {len(text):,} characters, and mpirun's command line has room for {_LONGEST:,} of them; it "
            f"begins with {text[:60]!r}: hand long values to the ranks by the estimator's environment",
            code="SMP104",
        )
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise ConfigError(
            f"custom_mpi_options cannot be split into words: {error} in {masked_text(show_value(text))}; close the quote or "
            "write \\' ",
            code="SMP104",
        ) from None
    options: list[MpiOption] = []
    at = 0
    while at < len(words):
        option, at = _one(words, at)
        if option.name in _RESERVED:
            raise ConfigError(
                f"custom_mpi_options contains '{option}'; the job starts its processes from its own settings and two "
                f"answers cannot both hold; remove the option and set {_RESERVED[option.name]} instead",
                code="SMP104",
            )
        if _changes_output(option):
            raise ConfigError(
                f"custom_mpi_options contains '{option}', which changes how mpirun hands on what the ranks print; the "
                "launcher reads there which rank a line is from, and without it neither progress nor failures nor a "
                "request to stop would work; remove the option: the job's log has the lines of all ranks",
                code="SMP104",
            )
        options.append(option)
    return options


def _changes_output(option: MpiOption) -> bool:
    if option.name == "output":
        return option.value != "tag"
    return option.name in _OUTPUT_OPTIONS or (option.name in _PARAMETER_OPTIONS and option.key in _OUTPUT_PARAMETERS)


def merge(defaults: Iterable[MpiOption], custom: Iterable[MpiOption]) -> MergedOptions:
    """Put custom options over defaults: the custom one wins, an equal repetition counts once.

    Custom options that contradict each other are listed in ``conflicts`` (the last one stands in ``options``).
    """
    chosen: dict[tuple[str, str], MpiOption] = {option.subject: option for option in defaults}
    replaced = []
    given: dict[tuple[str, str], list[MpiOption]] = {}
    for option in custom:
        same = given.setdefault(option.subject, [])
        if option not in same:
            same.append(option)
    for subject, group in given.items():
        default = chosen.pop(subject, None)
        if default is not None and default != group[-1]:
            replaced.append((default, group[-1]))
        chosen[subject] = group[-1]
    conflicts = tuple(tuple(group) for group in given.values() if len(group) > 1)
    return MergedOptions(tuple(chosen.values()), tuple(replaced), conflicts)


def check_mpi_options(text: str) -> list[MpiOption]:
    """Parse, and refuse contradictions, before a job is sent; raises ConfigError as the two do."""
    options = parse_mpi_options(text)
    merge((), options).raise_for_conflicts()
    return options


def exported_variables(options: Iterable[MpiOption]) -> dict[str, str]:
    """Return the variables that ``-x NAME=VALUE`` sets for the ranks (not the bare ``-x NAME``)."""
    exported = {}
    for option in options:
        is_variable = option.name == _VARIABLE_OPTION
        if is_variable and option.value is not None:
            exported[option.key] = option.value
    return exported


def _one(words: list[str], at: int) -> tuple[MpiOption, int]:
    """Parse the option that starts at ``words[at]``; return it and the index after it."""
    word = words[at]
    name = word.lstrip("-")
    if not word.startswith("-") or not name:
        before = f" after '{words[at - 1]}'" if at else ""
        raise ConfigError(
            f"custom_mpi_options contains the word {word!r}{before}, which belongs to no option; mpirun would start it "
            "as the program instead of the training script; put the option it belongs to before it, or quote a value "
            "that holds spaces",
            code="SMP104",
        )
    at += 1
    name, equals, value = name.partition("=")
    takes_words = name == _VARIABLE_OPTION or name in _PARAMETER_OPTIONS
    if equals and takes_words:
        words.insert(at, value)  # mpirun would take the sign for a part of what follows
    if name in _PARAMETER_OPTIONS:
        return _parameter(word, name, words, at)
    if name == _VARIABLE_OPTION:
        return _variable(words, at)
    is_toolkit_variable = name == _TOOLKIT_VARIABLE
    if equals:
        option = MpiOption(_VARIABLE_OPTION, name, value) if is_toolkit_variable else MpiOption(name, "", value)
        return option, at
    has_value = len(words) > at and not words[at].startswith("-")
    if is_toolkit_variable:
        if not has_value:
            raise ConfigError(
                f"'{word}' in custom_mpi_options needs a value, and none follows; write '-x {name}=INFO'", code="SMP104"
            )
        return MpiOption(_VARIABLE_OPTION, name, words[at]), at + 1
    if name in _FLAGS or not has_value:
        return MpiOption(name), at
    return MpiOption(name, "", words[at]), at + 1


def _parameter(word: str, name: str, words: list[str], at: int) -> tuple[MpiOption, int]:
    """Parse ``--mca PARAMETER VALUE``, after the option's word."""
    if len(words) < at + 2:
        raise ConfigError(
            f"'{word}' in custom_mpi_options needs a parameter and a value, and {len(words) - at} of the two "
            f"follow; write for example '--{name} btl_tcp_if_include eth0'",
            code="SMP104",
        )
    return MpiOption(name, words[at], words[at + 1]), at + 2


def _variable(words: list[str], at: int) -> tuple[MpiOption, int]:
    """Parse ``-x NAME=VALUE`` or ``-x NAME``, after the option's word."""
    if len(words) <= at or words[at][:1] in ("", "-", "="):
        raise ConfigError(
            "'-x' in custom_mpi_options needs a variable, and none follows; write '-x NAME=VALUE' or '-x NAME'",
            code="SMP104",
        )
    variable, equals, value = words[at].partition("=")
    return MpiOption(_VARIABLE_OPTION, variable, value if equals else None), at + 1
