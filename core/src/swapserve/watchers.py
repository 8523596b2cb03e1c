"""Calling the plugins that watch: each on its own, so that one that raises is dropped and harms no one."""

from __future__ import annotations

import logging
from typing import Any

import pluggy

logger = logging.getLogger(__name__)

WATCHING_HOOKS = (
    "swapserve_step_planned",
    "swapserve_step_finished",
    "swapserve_request_submitted",
    "swapserve_request_finished",
)


class Watchers:
    """The watching hooks of every registered plugin."""

    def __init__(self, manager: pluggy.PluginManager | None = None) -> None:
        self._callers: dict[str, dict[str, Any]] = {name: {} for name in WATCHING_HOOKS}
        plugins = manager.list_name_plugin() if manager is not None else []
        for name in WATCHING_HOOKS:
            for plugin_name, plugin in plugins:
                assert manager is not None
                others = [other for _, other in plugins if other is not None and other is not plugin]
                caller = manager.subset_hook_caller(name, others)
                if plugin is not None and caller.get_hookimpls():
                    self._callers[name][plugin_name] = caller

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call one hook of every plugin; whoever raises is reported once, by name, and never called again."""
        for plugin_name, caller in list(self._callers[hook].items()):
            try:
                caller(**arguments)
            except Exception:
                logger.exception("plugin %r raised in %s and is not called any more", plugin_name, hook)
                for callers in self._callers.values():
                    callers.pop(plugin_name, None)
