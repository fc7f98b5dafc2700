# SPDX-License-Identifier: Apache-2.0
"""OpManager: discover, decide, bind, call, explain, freeze, and survive a fork."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .availability import Availability
from .binding import Binding, annotate_call, compose, native_binding, reachable, refuse_first
from .builtin_ops import DEVICE_PROBE
from .config import Config, load_config, sources_in_context
from .decision import Call, Decision, decide, only_named
from .discovery import PluginRecord, discover
from .errors import DispatchFrozen, NoImplementationError, UnknownOpError, did_you_mean
from .fork import renew_all, reset_in_child
from .freezing import LATE, frozen_text, order_text, with_late_ones
from .log import configure_logging, logger
from .memory import remember
from .packaged import policy_files
from .policy import PolicyScope, SelectionPolicy, active_scope
from .registry import OpRegistry, OpRegistrySnapshot
from .summary import hello, say
from .types import DeviceFacts, OpImpl, VendorInfo, Verdict

__all__ = ["OpManager"]

_Table = dict[str, Binding]


class OpManager:
    """Chooses implementations and hands out plain callables.

    Args:
        registry: where implementations live; None makes a new one.
        config: the configuration; None reads environment and files at first use.
        device: the device to decide for; None detects it at first use.
    """

    def __init__(
        self,
        registry: OpRegistry | None = None,
        *,
        config: Config | None = None,
        device: DeviceFacts | None = None,
    ) -> None:
        self._registry = OpRegistry() if registry is None else registry
        self._config = config
        self._own_config = False  # read from the environment, and not handed in
        self._given_device = device
        self._plugins: tuple[PluginRecord, ...] = ()
        self._said = ""  # of itself; a fork has it from its parent
        self._start_over()
        self._registry.on_change(self._invalidate)
        self._registry.before_removal(self._before_removal)
        reset_in_child(self)

    def _start_over(self) -> None:
        """Everything that is not configuration or registry, as in a new process."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._ready = False
        self._initializing = False
        self._read_with: object = None  # the packages' policies when the configuration was read
        self._device: DeviceFacts | None = self._given_device
        self._known = Availability()
        self._bound: dict[str, set[str]] = {}
        self._frozen: OpRegistrySnapshot | None = None
        self._checked_policies: dict[SelectionPolicy, bool] = {}
        self._invalidate()

    def _invalidate(self) -> None:
        # No lock: the registry calls this under its own. A resolve in progress took the old
        # table before it read the registry, so what it stores there is never looked at.
        self._table: _Table = {}
        self._scoped: dict[PolicyScope, _Table] = {}

    def _after_fork_in_child(self) -> None:
        self._start_over()
        self._plugins = ()
        self._registry.drop_discovered()  # all of it: another thread may have been half-way

    # ------------------------------------------------------------------ what is known

    @property
    def registry(self) -> OpRegistry:
        """Registering into it needs no ceremony; the next resolve sees it."""
        return self._registry

    @property
    def config(self) -> Config:
        """The effective configuration."""
        if self._config is None:
            with self._lock:
                if self._config is None:
                    self._config = load_config()
                    self._own_config = True
        return self._config

    def read_config(self, additional: Mapping[str, Any] | None = None) -> Config:
        """Read every source anew; `additional` is vLLM's additional_config["vllm_fl"]."""
        self._read_with = self._registry.policies
        files = policy_files(self.device, self._registry.snapshot())
        return load_config(additional=additional, **files)

    @property
    def base_policy(self) -> SelectionPolicy:
        """The policy outside of any policy context, shipped orders included."""
        self.ensure_initialized()
        return self.config.policy

    @property
    def policy_in_force(self) -> SelectionPolicy:
        """The base policy, as the policy contexts around the caller change it."""
        scope = active_scope()
        return self.base_policy if scope is None else scope.applied_to(self.base_policy)

    @property
    def device(self) -> DeviceFacts:
        """The device that decisions are made for."""
        if self._device is None:
            module, _, name = DEVICE_PROBE.partition(":")
            probe = getattr(importlib.import_module(module), name)
            vendor = self.config.platform
            self._device = probe(vendor, {} if vendor is None else self.known_vendors())
        return self._device

    def known_vendors(self) -> Mapping[str, VendorInfo]:
        """Every vendor by name: the device table's, and those that plugins brought. Discovery
        runs for it, and nothing else: no device is looked for and no policy is checked."""
        self._renew_if_forked()
        with self._lock:
            if self._registry.plugins is None and not self._initializing:
                self._initializing = True
                try:
                    self._discover(self.config)
                except BaseException:
                    self._registry.drop_discovered()
                    raise
                finally:
                    self._initializing = False
        return self._registry.snapshot().known_vendors()

    def get_discovered_plugins(self) -> tuple[PluginRecord, ...]:
        """What discovery ran, with versions, durations and errors."""
        self.ensure_initialized()
        return self._plugins

    @property
    def frozen(self) -> bool:
        """Whether decisions are pinned."""
        return self._frozen is not None

    # ---------------------------------------------------------------- initialisation

    def ensure_initialized(self) -> None:
        """Run discovery once per process. Safe from any thread, and after any kind of fork.

        Raises:
            ConfigError: the configuration is wrong; nothing stays registered by plugins.
            PluginError: under strict, a plugin failed.
        """
        known = self._read_with is self._registry.policies  # else more were brought since
        if self._ready and known and self._pid == os.getpid():
            return
        self._renew_if_forked()
        with self._lock:
            if self._ready and self._frozen is None and not known:
                self._read_with = self._registry.policies
                if self._own_config:
                    self._config = self.read_config()
                    self._invalidate()
            if self._ready or self._initializing:  # the latter: a plugin that resolves
                return
            self._initializing = True
            try:
                config = self.config
                configure_logging(config.log_level)
                try:
                    self._discover(config)
                    device = self.device  # a wrong VLLM_FL_PLATFORM is found here
                    if self._own_config:
                        self._config = config = self.read_config()
                    config.check_against(self._registry.snapshot(), self._plugin_notes())
                except BaseException:  # Ctrl-C too
                    self._registry.drop_discovered()
                    if self._own_config:
                        self._config = None  # the next attempt reads what may be mended by then
                    raise
                self._invalidate()  # a plugin may have resolved before the policy was complete
                self._ready = True
            finally:
                self._initializing = False
        self._say_hello(device)

    def _renew_if_forked(self) -> None:
        if self._pid != os.getpid():
            renew_all()  # forked behind Python's back

    def _discover(self, config: Config) -> None:
        if self._registry.plugins is None:  # else another manager's discovery ran
            self._registry.plugins = discover(
                self._registry, config.plugin_modules, strict=config.policy.strict
            )
        self._plugins = self._registry.plugins

    def _plugin_notes(self) -> list[str]:
        return [f"Note: {p.name} failed ({p.error})." for p in self._plugins if not p.ok]

    def _say_hello(self, device: DeviceFacts) -> None:
        if logger.isEnabledFor(logging.INFO):

            def winner_of(op_name: str) -> str:  # without policy contexts, and not strict
                return self._decide_purely(op_name, self.base_policy).winner_id or "nothing"

            names = self._registry.list_operators()
            self._said = say(hello(device, names, winner_of, self._plugins), self._said)

    def configure(self, config: Config) -> None:
        """Replace the configuration.

        Raises:
            ConfigError: it names an op, vendor or implementation that is not known.
            PluginError: it is strict, and a plugin has failed.
            DispatchFrozen: it would change a decision that a loaded model relies on.
        """
        self.ensure_initialized()
        with self._lock:
            config.check_against(self._registry.snapshot(), self._plugin_notes())
            failed = [record for record in self._plugins if not record.ok]
            if config.policy.strict and failed:
                raise failed[0].strict_error()
            if self._frozen is not None:
                self._refuse_other_orders(config.policy)
            self._config = config
            self._own_config = False
            self._invalidate()

    def set_device(self, device: DeviceFacts) -> None:
        """State the device, where the caller knows it better than detection does."""
        with self._lock:
            if self._frozen is not None and device != self._device:
                raise DispatchFrozen(frozen_text(f"the device would become {device}"))
            another = device != self._device
            self._given_device = self._device = device
            if another and self._own_config and self._ready:
                self._config = self.read_config()  # another device has another shipped policy
            self._invalidate()

    # ---------------------------------------------------------------------- decisions

    def decide(
        self,
        op_name: str,
        /,
        *,
        device: DeviceFacts | None = None,
        facts: Mapping[str, Any] | None = None,
        call: Call | None = None,
        mode: str = "eager",
        layer: bool = False,
        dispatch_compiled: bool = False,
        batch_invariant: bool = False,
    ) -> Decision:
        """The Decision under the policy in force; loads nothing and calls no implementation.

        Args: see `vllm_fl.dispatch.decision.decide`; `device` replaces this one's facts.

        Raises:
            UnknownOpError: nobody declared or registered the op.
        """
        self.ensure_initialized()
        snapshot = self._frozen or self._registry.snapshot()
        policy, sources = self._policy_in_force()
        impls = snapshot.impls_by_op.get(op_name, ())
        if not impls and op_name not in snapshot.declarations:
            raise UnknownOpError(self._unknown_text(op_name, snapshot))
        if policy.strict and op_name not in snapshot.declarations:
            raise UnknownOpError(
                f"op '{op_name}' has implementations but no declaration, and strict mode is on."
                f"{did_you_mean(op_name, snapshot.declarations)}"
            )
        target = device or self.device
        signature = snapshot.declarations.get(op_name)
        fuses = signature.fuses if signature is not None and layer else ()
        alike: dict[str, Any] = {"device": device, "mode": mode, "batch_invariant": batch_invariant}
        decision = decide(
            op_name,
            impls,
            policy,
            target,
            availability=lambda impl: self._availability_on(impl, target),
            signature=signature,
            facts=facts,
            call=call,
            mode=mode,
            layer=layer,
            dispatch_compiled=dispatch_compiled,
            batch_invariant=batch_invariant,
            parts={part: self.decide(part, layer=True, **alike).winner for part in fuses},
            sources=sources,
        )
        if self._frozen is None:
            return decision
        return with_late_ones(decision, impls, self._registry.get_implementations(op_name))

    def explain(self, op_name: str, /, *args: Any, **kwargs: Any) -> Decision:
        """What would run for these arguments, or in general without any, and why."""
        call = Call(args, kwargs) if args or kwargs else None
        return self.decide(op_name, call=call)

    def bind(self, op_name: str, /, donate: bool = False, **facts: Any) -> Callable[..., Any]:
        """Choose once and return a plain callable.

        With all facts of the op given, its layer guards are answered here; otherwise they
        are asked at each call. Where the winner has no guard left to ask, this is the
        implementation's own function.

        Args:
            donate: the caller gives up the arguments that an implementation may write.
                Without it, those of an in-place winner are cloned.
            **facts: what is fixed when a layer is built, by the op's fact names.

        Raises:
            UnknownOpError, NoImplementationError (listing every candidate with its reason),
            GuardRejected (strict), TypeError (an unknown fact).
        """
        return self.bind_op(op_name, donate=donate, facts=facts or None).fn

    def bind_op(
        self,
        op_name: str,
        /,
        *,
        donate: bool = False,
        facts: Mapping[str, Any] | None = None,
        mode: str = "eager",
        layer: bool = False,
        dispatch_compiled: bool = False,
        batch_invariant: bool = False,
        otherwise: Callable[..., Any] | None = None,
    ) -> Binding:
        """As `bind`, and returns the decision too. With `layer`, native may win: then `fn`
        raises, because vLLM's own forward is the layer's business. With `otherwise`, that
        takes the calls which the implementations that the policy names refuse."""
        self.ensure_initialized()
        signature = (self._frozen or self._registry.snapshot()).declarations.get(op_name)
        known = signature is None or signature.has_all_facts(facts)
        while True:
            decision = self.decide(
                op_name,
                facts=facts if known else None,
                mode=mode,
                layer=layer,
                dispatch_compiled=dispatch_compiled,
                batch_invariant=batch_invariant,
            )
            strict = self.policy_in_force.strict
            if strict and decision.first_choice_rejected is not None:
                refuse_first(op_name, decision.first_choice_rejected)
            if decision.native:
                return native_binding(decision)
            if decision.winner is None:
                raise NoImplementationError(decision.nothing_text())
            if otherwise is not None and not decision.by_priority:
                decision = only_named(decision, self.policy_in_force)
            chain = reachable(decision.candidates, facts_known=known)
            # The whole chain is loaded now, so that no call ever imports anything.
            if all([self._known.load(impl) for impl in chain]):
                break
        how: dict[str, Any] = {"donate": donate, "strict": strict, "otherwise": otherwise}
        binding = compose(decision, signature, facts_known=known, **how)
        with self._lock:
            ids = self._bound.setdefault(op_name, set())
            ids.update(impl.impl_id for impl in chain)
        return binding

    def resolve(self, op_name: str, /) -> Callable[..., Any]:
        """The callable for an op under the policy in force: functional, guards included."""
        return self._resolved(op_name).fn

    def resolve_candidates(self, op_name: str, /) -> tuple[OpImpl, ...]:
        """The implementations that could run, in the order in which they are preferred."""
        return self.decide(op_name).candidates

    def get_selected_impl_id(self, op_name: str, /) -> str | None:
        """The impl_id of the winner, or None where nothing is available."""
        return self.decide(op_name).winner_id

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the op. An exception of the implementation propagates, with notes."""
        binding = self._binding(op_name)
        try:
            return binding.fn(*args, **kwargs)
        except Exception as error:
            annotate_call(error, binding, args, kwargs)
            raise

    def _binding(self, op_name: str) -> Binding:
        scope = active_scope()
        table = self._table if scope is None else self._scoped.get(scope, {})
        return table.get(op_name) or self._resolved(op_name)

    def _resolved(self, op_name: str) -> Binding:
        self.ensure_initialized()
        scope = active_scope()
        table = self._table if scope is None else remember(self._scoped, scope, {})
        binding = table.get(op_name)
        if binding is None:
            binding = table[op_name] = self.bind_op(op_name)
        return binding

    def _policy_in_force(self) -> tuple[SelectionPolicy, Mapping[str, str]]:
        policy = self.policy_in_force
        if active_scope() is None:
            return policy, self.config.sources
        sources = sources_in_context(policy, self.config)
        if policy not in self._checked_policies:
            Config(policy=policy, sources=sources).check_against(
                self._registry.snapshot(), self._plugin_notes()
            )
            remember(self._checked_policies, policy, True)
        return policy, sources

    def _availability_on(self, impl: OpImpl, device: DeviceFacts) -> Verdict:
        if device != self.device:
            return impl.availability(device)
        return self._known.on(impl, device)

    def _unknown_text(self, op_name: str, snapshot: OpRegistrySnapshot) -> str:
        late = self._frozen is not None and op_name in self._registry.list_operators()
        return snapshot.unknown_text(op_name, [f"It was {LATE}."] if late else self._plugin_notes())

    # ---------------------------------------------------------------- freeze and thaw

    def freeze(self) -> None:
        """Pin what is registered and chosen now, because a loaded model relies on it."""
        self.ensure_initialized()
        with self._lock:
            self._frozen = self._frozen or self._registry.snapshot()
            self._invalidate()

    def thaw(self) -> None:
        """Let decisions follow registry and policy again. Layers that are bound stay so."""
        with self._lock:
            self._frozen = None
            self._bound.clear()
            self._invalidate()

    def _before_removal(self, op_name: str, impl_id: str) -> None:
        if self._frozen is not None and impl_id in self._bound.get(op_name, ()):
            raise DispatchFrozen(
                frozen_text(f"implementation '{impl_id}' of op '{op_name}' would be removed")
            )

    def _refuse_other_orders(self, policy: SelectionPolicy) -> None:
        assert self._frozen is not None
        for op_name in self._bound:
            before, after = (self._order_under(p, op_name) for p in (self.base_policy, policy))
            if before != after:
                raise DispatchFrozen(
                    frozen_text(f"the order of op '{op_name}' would go from {before} to {after}")
                )

    def _order_under(self, policy: SelectionPolicy, op_name: str) -> str:
        usable = {impl.impl_id for impl in self._decide_purely(op_name, policy).candidates}
        return order_text(op_name, self._impls_in_force(op_name), policy, self.device, usable)

    def _decide_purely(self, op_name: str, policy: SelectionPolicy) -> Decision:
        device = self.device
        return decide(
            op_name,
            self._impls_in_force(op_name),
            policy,
            device,
            availability=lambda impl: self._availability_on(impl, device),
            signature=self._registry.get_signature(op_name),
        )

    def _impls_in_force(self, op_name: str) -> tuple[OpImpl, ...]:
        snapshot = self._frozen or self._registry.snapshot()
        return snapshot.impls_by_op.get(op_name, ())

    def fingerprint(self, extra: tuple[str, ...] = ()) -> str:
        """A hash of everything that decides which code runs; see `fingerprint.py`."""
        from .fingerprint import fingerprint  # with hashlib and json, a sixth of the import time

        self.ensure_initialized()
        snapshot = self._frozen or self._registry.snapshot()
        return fingerprint(snapshot, self._policy_in_force()[0], self.device, extra=extra)
