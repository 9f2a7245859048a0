"""The command line of ``train.py``: its help, what may be typed, and Hydra's errors in our words.

Level 0: imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, ClassVar, NoReturn

import hydra._internal.hydra as hydra_internals
import yaml
from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.config.bind import did_you_mean, open_dicts, schema_fields
from lockstep.errors import UserError

HELP = """\
lockstep trains image classifiers; the run is the same whichever strategy or GPU count computes it.

usage: python train.py [GROUP=OPTION ...] [KEY=VALUE ...] [FLAGS]

  python train.py                                     a small ViT on the embedded digits
  python train.py strategy=fsdp model=vit             ViT-B/16, sharded over all visible GPUs
  python train.py data=folder data.root=/my/images    your own train/<class>/* and val/<class>/*
  python train.py model=timm model.name=convnext_tiny any model of timm
  python train.py launch.processes=4 batch.global=512 four processes, whatever the batch per process
  python train.py plan=true model=vit_large           all numbers and refusals, nothing started
  python train.py -m strategy=single,ddp seed=1,2     a sweep: one run folder for each combination
  python train.py -m seed=range(8) sweep.jobs=4       four at a time; again, it does what is left
  python train.py --config-path RUN --config-name config    a saved run again

groups (files below conf/):
{groups}

keys (python train.py --cfg job prints all of them with their values):
{keys}
  below model.kwargs and optimizer.kwargs any name is legal: model.kwargs.depth=6

flags:
  --help            this text
  --cfg job         print the composed configuration, do not run
  -m, --multirun    sweep over comma-separated values
  --config-path, --config-name, --config-dir    other configuration files
  --shell-completion install=bash               see --hydra-help for other shells and flags

exit codes: 0 done, 2 a mistake in the command, data or environment (one message names the fix),
85 stopped on request and saved (the same command goes on), 1 anything else.
"""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
KEYS_IN_HELP = ("run.", "batch.", "optimizer.lr", "ema.enabled")
"""Beside those of the top level: names, or beginnings of names."""

HYDRA = (
    "hydra.run.dir=.",
    "hydra.sweep.dir=${run.root}/.sweep",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job_logging.root=null",
    "hydra.hydra_logging.root=null",
)
"""One run, one folder: Hydra itself writes and logs nothing. Here and not in ``conf/``, so that it
holds for a saved configuration, too."""


SWEEP_TARGETS = {
    "hydra.sweeper._target_": ("hydra._internal.core_plugins.", "hydra_plugins."),
    "hydra.launcher._target_": ("hydra._internal.core_plugins.", "hydra_plugins."),
    "hydra.sweeper.sampler._target_": ("optuna.samplers.",),
}
"""What Hydra makes for a sweep: beginnings of names."""

SWEEP_CODE = (
    "hydra.sweeper.custom_search_space", "hydra.launcher.setup", "hydra.launcher.python",
    "hydra.launcher.srun_args", "hydra.launcher.additional_parameters",
)  # fmt: skip
"""What Optuna and submitit execute, or hand on to Slurm."""


@dataclass(frozen=True)
class Command:
    """A checked command line."""

    flags: list[str]
    """Hydra's own, except the one that starts a sweep."""
    overrides: list[str]
    multirun: bool
    completes: bool
    """It is the shell that asks, for what could be typed next."""

    @property
    def argv(self) -> list[str]:
        """The arguments as Hydra is to see them."""
        sweep = ["--multirun"] if self.multirun else []
        ours = [] if self.completes else [*HYDRA, *self._optuna]
        return [*self.flags, *sweep, *ours, *self.overrides]

    @property
    def _optuna(self) -> list[str]:
        """What the sweeper cannot know: that failures happen."""
        chosen = "hydra/sweeper=optuna" in self.overrides
        return ["hydra.sweeper.max_failure_rate=1.0"] if chosen else []

    @property
    def varied(self) -> list[str]:
        """The keys of a sweep that are given several values or a range."""
        typed = OverridesParser.create().parse_overrides(self.overrides)
        return [o.key_or_group for o in typed if o.is_sweep_override()]

    def swept(self, overrides: Sequence[str]) -> list[str]:
        """Those overrides of a sweep's job that differ from job to job."""
        typed = OverridesParser.create().parse_overrides(self.overrides)
        same = {o.key_or_group for o in typed if not o.is_sweep_override()}
        return [o for o in overrides if o.lstrip("+~").partition("=")[0] not in same]


class _NoCallbacks(Callbacks):
    """Takes the place of Hydra's, which calls whatever the configuration names."""

    sweep_begins: ClassVar[Callable[[DictConfig], None]]

    def __init__(self, config: DictConfig | None = None, **_: Any) -> None:
        super().__init__()
        for key in ("hydra.callbacks", "hydra.job.env_set"):
            if config is not None and OmegaConf.select(config, key):
                raise UserError(f"{key}: a configuration runs nothing here; remove the key")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        for key, allowed in SWEEP_TARGETS.items():
            if not str(OmegaConf.select(config, key, default=allowed[0])).startswith(allowed):
                raise UserError(f"{key}: a configuration runs nothing here; remove the key")
        for key in SWEEP_CODE:
            typed = any(o.lstrip("+~").startswith(key) for o in config.hydra.overrides.hydra)
            if OmegaConf.select(config, key) and not typed:
                raise UserError(f"{key}: only on the command line, since it runs commands")
        if OmegaConf.select(config, "hydra.sweeper.storage"):
            raise UserError(
                "hydra.sweeper.storage: the Optuna that Hydra's sweeper needs cannot use today's "
                "SQLAlchemy; leave it out: with hydra.sweeper.sampler.seed=N the same command "
                "finds its finished trials in the sweep's ledger"
            )
        _NoCallbacks.sweep_begins(config)


def disarm_hydra(sweep_begins: Callable[[DictConfig], None]) -> None:
    """Let Hydra compose, and call nothing: a saved configuration may come from a stranger.

    Hydra makes its callbacks of every composed configuration, before it acts upon it.

    Args:
        sweep_begins: is shown the configuration of a sweep before its jobs are composed.
    """
    _NoCallbacks.sweep_begins = staticmethod(sweep_begins)
    hydra_internals.Callbacks = _NoCallbacks  # type: ignore[attr-defined]


def quoted(value: str) -> str:
    """A text as a value on the command line of train.py (the shell may want quotes of its own)."""
    is_word = re.fullmatch(r"(\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./+-]*", value)
    if is_word and value.lower() not in ("null", "true", "false", "nan", "inf"):
        return value
    # A backslash is one, but before a quote; what begins like an interpolation is none.
    value = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", r"\'").replace("${", r"\${")
    return f"'{value}'"


def wants_help(argv: Sequence[str]) -> bool:
    """Whether our own help is asked for."""
    return "--help" in argv or "-h" in argv


def help_text(conf: Path) -> str:
    """The help, with the groups below ``conf`` and what the schema says of keys."""
    sections = {key.rpartition(".")[0] for key in schema_fields()}
    keys = {
        key: field.description or ""
        for key, field in schema_fields().items()
        if key not in sections and ("." not in key or key.startswith(KEYS_IN_HELP))
    }
    named = {group: ", ".join(options) for group, options in groups(conf)}
    return HELP.format(groups=_two_columns(named), keys=_two_columns(keys))


def _two_columns(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(
        fill(text, 100, initial_indent=f"  {name:<{width}}  ", subsequent_indent=" " * (width + 4))
        for name, text in rows.items()
    )


def groups(conf: Path) -> list[tuple[str, list[str]]]:
    """Config groups and their options; names that begin with ``_`` are not for choosing."""
    return [
        (folder.name, sorted(f.stem for f in folder.glob("[!_]*.yaml")))
        for folder in sorted(conf.iterdir())
        if folder.is_dir()
    ]


def read_command(argv: Sequence[str]) -> Command:
    """Check flags, let flags and overrides mix, and open the dictionaries that take any name.

    A relative ``--config-path`` is one of the current folder, not of the folder of ``train.py``.

    Raises:
        UserError: an unknown flag, a flag without its value, or several options of a group.
    """
    parser = get_args_parser()
    parser.error = _flag_error  # type: ignore[method-assign]
    known = [option for action in parser._actions for option in action.option_strings]
    for word in argv:
        flag = word.partition("=")[0]
        if word.startswith("--") and not any(k.startswith(flag) for k in known):
            key = flag.removeprefix("--")
            is_key = key in schema_fields()
            hint = f"; a key has no dashes: {key}=VALUE" if is_key else did_you_mean(flag, known)
            raise UserError(f"unknown flag {flag}{hint}")
    args = parser.parse_intermixed_args(list(argv))
    if args.config_path and "://" not in args.config_path:
        args.config_path = os.path.abspath(args.config_path)
    flags: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or action.dest == "multirun" or not value:
            continue
        flags += [action.option_strings[0]] if value is True else [action.option_strings[0], value]
    completes = bool(args.shell_completion)
    overrides = args.overrides
    if not completes:
        _refuse_several_options(overrides)
        overrides = [_opened(o) for o in overrides]
    return Command(flags, overrides, args.multirun, completes)


def explain(error: Exception, conf: Path) -> str | None:
    """What a composition error means for the user; None: it is none."""
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing_file(error, text)
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: cannot be read as KEY=VALUE; put a value with spaces, commas, "
            "brackets or letters that are not English into quotes: key=\"'a, b'\""
        )
    if match := re.search(r"Could not override '([^']+)'|config group '([^']+)' does not", text):
        return _unknown_key(match[1] or match[2], conf)
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]}: several values need a sweep: python train.py -m {match[1]}"
    if "Config group override must be a string" in text:
        return (
            "command line: a group that is null, or =VALUE without its key: leave it out, or give "
            "the group one of the options that --help lists"
        )
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):
        return "configuration: " + " ".join(text.split())
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}: make room, or choose another place"
    if isinstance(error, ValueError) and _raised_in_hydra(error):
        return "command line: " + " ".join(text.split())
    return None


def _flag_error(message: str) -> NoReturn:
    raise UserError(f"{message}: see python train.py --help")


def _refuse_several_options(overrides: Sequence[str]) -> None:
    """``strategy=[ddp,fsdp]``, which Hydra would lay over each other."""
    sections = {name.partition(".")[0] for name in schema_fields() if "." in name}
    for override in overrides:
        key, _, value = override.partition("=")
        if value.startswith("[") and key.lstrip("+~") in sections:
            options = value.strip("[]").replace(" ", "")
            raise UserError(
                f"{override}: a group has one option; several need a sweep: python train.py -m "
                f"{key}={options}"
            )


def _opened(override: str) -> str:
    """``model.kwargs.depth=6`` with Hydra's ``++``, without which only known names are legal."""
    key = override.partition("=")[0]
    opened = any(key == name or key.startswith(name + ".") for name in open_dicts())
    return f"++{override}" if opened and "=" in override else override


def _missing_file(error: MissingConfigException, text: str) -> str:
    options = sorted(o for o in error.options or () if not o.startswith("_"))
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return "configuration: " + " ".join(text.split())
    hint = did_you_mean(option, options)
    if group.startswith("hydra/"):
        hint = "; Optuna, joblib and submitit come with pip install -e '.[sweep]'"
    return f"{group} = {option}: no such option{hint}; options: {', '.join(options)}"


def _unknown_key(key: str, conf: Path) -> str:
    names = [group for group, _ in groups(conf)]
    if key in names:
        return f"{key}: this configuration has no group to choose from; set its keys: {key}.KEY=..."
    hint = did_you_mean(key, [*schema_fields(), *names])
    return f"{key}: unknown key or group{hint or '; python train.py --help lists them'}"


def _raised_in_hydra(error: Exception) -> bool:
    trace, module = error.__traceback__, ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module.startswith(("hydra.", "hydra_plugins.", "omegaconf.", "optuna."))
