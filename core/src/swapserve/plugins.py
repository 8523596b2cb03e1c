"""Finding plugins and picking policies from them by name.

A plugin is an entry point in the group `swapserve`. An entry point named `scheduler_X`, `kv_X` or
`speculator_X` offers the policy X and is imported only when X is asked for, so that a heavy or broken
package costs nothing to those who do not use it. Any other entry point may watch the loop and is
imported when a server starts.
"""

from __future__ import annotations

import importlib
import logging
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from swapserve import hookspecs, no_speculation
from swapserve.policies import POLICY_KINDS, KVManager, Scheduler, Speculator

logger = logging.getLogger(__name__)

GROUP = "swapserve"
PolicyClass = type[Scheduler] | type[KVManager] | type[Speculator]
REGISTER_HOOKS = {
    "scheduler": "swapserve_register_scheduler",
    "kv": "swapserve_register_kv_manager",
    "speculator": "swapserve_register_speculator",
}


class PluginError(ValueError):
    """A plugin or policy asked for cannot be had; the message says why and what there is instead."""


@dataclass
class PluginRecord:
    """One plugin that is installed: where it comes from and, once imported, what it offers or why it is broken."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint | None = None
    policies: dict[str, list[PolicyClass]] = field(default_factory=dict)
    import_seconds: float | None = None
    error: str | None = None
    traceback: str | None = None

    @property
    def offers(self) -> tuple[str, str] | None:
        """(kind, policy name) as the entry point's name says it; None for a plugin that watches or offers several."""
        kind, _, name = self.name.partition("_")
        return (kind, name) if kind in POLICY_KINDS and name else None


class Plugins:
    """The plugins of this environment: a fresh set each time, nothing global."""

    def __init__(self, found: Iterable[EntryPoint] | None = None) -> None:
        self.manager = build_plugin_manager()
        self.records: list[PluginRecord] = []
        self.register(no_speculation, "speculator_none", "swapserve")
        for entry in sorted(entry_points(group=GROUP) if found is None else found, key=_order):
            dist = entry.dist
            self.records.append(
                PluginRecord(entry.name, dist.name if dist else "?", dist.version if dist else "?", entry)
            )

    def register(self, plugin: object, name: str, distribution: str = "(given)", version: str = "") -> PluginRecord:
        """Add a plugin object that is not installed: a module or any object with hook implementations."""
        record = PluginRecord(name, distribution, version)
        self.records.append(record)
        self._adopt(record, plugin)
        return record

    def load(self, record: PluginRecord) -> None:
        """Import one plugin, once. A failure is logged and kept in its record; it never raises."""
        if record.entry_point is None or record.import_seconds is not None:
            return
        started = time.perf_counter()
        try:
            self._adopt(record, record.entry_point.load())
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            record.traceback = traceback.format_exc()
            logger.warning(
                "plugin %r of distribution %s %s (%s) is left out: %s",
                record.name,
                record.distribution,
                record.version,
                record.entry_point.value,
                record.error,
            )
        record.import_seconds = time.perf_counter() - started

    def load_watchers(self) -> pluggy.PluginManager:
        """Import every plugin that is not the offer of one policy; returns the manager, for the engine to call."""
        for record in self.records:
            if record.offers is None:
                self.load(record)
        return self.manager

    def load_all(self) -> Sequence[PluginRecord]:
        """Import everything: for a listing."""
        for record in self.records:
            self.load(record)
        return self.records

    def policy(self, kind: str, name: str) -> PolicyClass:
        """The policy class called `name`; `PluginError` when there is none, several, or its plugin is broken."""
        if ":" in name:
            return _import_policy(kind, name)
        named = [record for record in self.records if record.offers == (kind, name)]
        for record in named:
            self.load(record)
        self.load_watchers()
        offers = [
            (record, offered)
            for record in self.records
            for offered in record.policies.get(kind, ())
            if offered.name == name
        ]
        if len({record.distribution for record in named} | {record.distribution for record, _ in offers}) > 1:
            both = " and ".join(
                sorted({f"{r.distribution} {r.version}".strip() for r in named + [r for r, _ in offers]})
            )
            raise PluginError(
                f"{kind} {name!r} is offered by {both}: uninstall one, or name it as package.module:Class"
            )
        for record in named:
            if record.error is not None:
                raise PluginError(
                    f"{kind} {name!r}: the plugin {record.name!r} of {record.distribution} {record.version} "
                    f"could not be imported: {record.error}"
                )
        if not offers:
            raise PluginError(f"there is no {kind} {name!r}; there are: {', '.join(self.names(kind)) or 'none'}")
        return offers[0][1]

    def names(self, kind: str) -> list[str]:
        """The names of all policies of a kind, from what was imported and from the names of entry points."""
        names = {record.offers[1] for record in self.records if record.offers and record.offers[0] == kind}
        names |= {offered.name for record in self.records for offered in record.policies.get(kind, ())}
        return sorted(names)

    def _adopt(self, record: PluginRecord, plugin: object) -> None:
        """Register a plugin and ask it for its policies; leaves nothing behind when it is refused."""
        # The same module may be reached by two entry points: the manager knows it once.
        key = f"{record.distribution}:{record.name}"
        fresh = not self.manager.is_registered(plugin)
        if fresh:
            self.manager.register(plugin, name=key)
        try:
            self.manager.check_pending()
            record.policies = {kind: self._offered(kind, plugin) for kind in POLICY_KINDS}
            if record.offers is not None:
                kind, name = record.offers
                offered = [policy.name for policy in record.policies[kind]]
                if name not in offered:
                    raise PluginError(
                        f"the entry point {record.name!r} promises the {kind} {name!r}, but its module registers "
                        f"{', '.join(offered) or 'none'}"
                    )
        except BaseException:
            record.policies = {}
            if fresh:
                self.manager.unregister(plugin)
            raise

    def _offered(self, kind: str, plugin: object) -> list[PolicyClass]:
        others = [other for _, other in self.manager.list_name_plugin() if other is not None and other is not plugin]
        answers = self.manager.subset_hook_caller(REGISTER_HOOKS[kind], others)()
        policies: list[PolicyClass] = []
        for answer in answers:
            for policy in answer if isinstance(answer, list | tuple) else [answer]:
                policies.append(_check_policy(kind, policy, "registers"))
        return policies


def build_plugin_manager() -> pluggy.PluginManager:
    """A fresh pluggy manager that knows the hook specs and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _order(entry: EntryPoint) -> tuple[str, str, str]:
    """An order that does not depend on the order of files on disk."""
    return (entry.name, entry.dist.name if entry.dist else "", entry.value)


def _import_policy(kind: str, path: str) -> PolicyClass:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PluginError(f"{kind} {path!r} could not be imported: {type(error).__name__}: {error}") from error
    return _check_policy(kind, found, path)


def _check_policy(kind: str, policy: Any, where: str) -> PolicyClass:
    wanted = POLICY_KINDS[kind]
    if not (isinstance(policy, type) and issubclass(policy, wanted)):
        raise PluginError(f"{where} {policy!r}: a {kind} must be a subclass of swapserve.{wanted.__name__}")
    if missing := sorted(getattr(policy, "__abstractmethods__", ())):
        raise PluginError(f"{where} {policy.__qualname__}: it does not define {', '.join(missing)}")
    if not isinstance(getattr(policy, "name", None), str):
        raise PluginError(f"{where} {policy.__qualname__}: it needs a class attribute `name`, a string")
    return policy
