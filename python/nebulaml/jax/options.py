"""The options of Orbax's CheckpointManager as settings of ours."""

from __future__ import annotations

from typing import Any

from .._session import config
from ..errors import NebulaConfigError

_TRANSLATED = {"save_interval_steps": "save_every_steps", "max_to_keep": "keep_last", "keep_period": "keep_every"}
# Options that change nothing here, with the values that do so; None: all.
_FITTING: dict[str, tuple[Any, ...] | None] = dict.fromkeys((
    "best_mode", "keep_checkpoints_without_metrics", "cleanup_tmp_directories", "enable_background_delete", "num_deletion_threads",
    "async_options", "multiprocessing_options", "file_options", "atomicity_options", "save_root_metadata", "single_host_load_and_broadcast",
    "enable_per_process_directory_creation", "lightweight_initialize", "temporary_path_class", "prevent_write_metrics",
    "enable_should_save_is_saving_in_progress_check",
)) | {"create": (True,), "enable_async_checkpointing": (True,)}  # fmt: skip
# Options in whose place Orbax takes a policy, if there is one.
_BY_POLICY = {
    "save_decision_policy": ("save_interval_steps", "save_on_steps", "should_save_fn"),
    "preservation_policy": ("max_to_keep", "keep_time_interval", "keep_period", "best_fn"),
}
# Orbax's policies: the attribute with the value, and the setting that takes it. None: the policy needs no setting.
_POLICIES: dict[str, tuple[str, str] | None] = {
    "FixedIntervalPolicy": ("interval", "save_every_steps"),
    "PreemptionCheckpointingPolicy": None,  # a manager saves after a notice in any case
    "PreserveAll": None,
    "LatestN": ("n", "keep_last"),
    "EveryNSteps": ("interval_steps", "keep_every"),
    "LatestDuration": ("duration", "keep_within"),
}
_FREE = {"exact_interval": True, "max_to_keep": None}  # attributes of policies, with the values that need no counterpart


def settings_of(options: Any) -> dict[str, Any]:
    """Returns the settings of ``Manager`` for an orbax.checkpoint.CheckpointManagerOptions.

    Options at their defaults are left out. Raises NebulaConfigError for an option without a counterpart. One is best_fn: a rule of the agent
    needs the name of a metric, so give Manager(keep_best=nebulaml.Best(...)).
    """
    plain, given = type(options)(), vars(options)
    settings: dict[str, Any] = {}
    refused = []
    replaced = {name for policy, names in _BY_POLICY.items() if given.get(policy) is not None for name in names}
    for name, value in given.items():
        default = getattr(plain, name, None)
        if name in replaced:
            continue
        if name in _TRANSLATED:
            if value is not None:
                settings[_TRANSLATED[name]] = value
        elif name in _BY_POLICY and value is not None:
            refused += [f"{name}={each}" for each in _add_policy(value, settings)]
        elif value == default or (name in _FITTING and value in (_FITTING[name] or (value,))):
            continue
        else:
            refused.append(f"{name}={value!r:.80}")
    if refused:
        raise NebulaConfigError(f"nebulaml.jax.Manager has no counterpart of {config.in_lines(sorted(refused))} (docs/jax.md)")
    if "keep_every" in settings and "keep_last" not in settings and given.get("preservation_policy") is None:
        del settings["keep_every"]  # Orbax keeps all then
    return settings


def _add_policy(policy: Any, settings: dict[str, Any]) -> list[str]:
    """Adds the settings for one of Orbax's policies. Returns the policies that have no counterpart."""
    kind = type(policy).__name__
    if kind in ("AnyPreservationPolicy", "AnySavePolicy"):
        if any(type(part).__name__ == "PreserveAll" for part in policy.policies):
            return []
        return [each for part in policy.policies for each in _add_policy(part, settings)]
    if kind not in _POLICIES:
        return [f"{policy!r:.80}"]
    values, translated = dict(vars(policy)), _POLICIES[kind]
    value = values.pop(translated[0]) if translated is not None else None
    if any(each != _FREE.get(name) for name, each in values.items()) or (translated is not None and translated[1] in settings):
        return [f"{policy!r:.80}"]
    if translated is not None and value is not None:
        settings[translated[1]] = value.total_seconds() if hasattr(value, "total_seconds") else value
    return []
