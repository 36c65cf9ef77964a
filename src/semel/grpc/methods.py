"""Which methods are covered: by name, by what their descriptors say, by their shape. Pure but for the descriptor pool.

A name is "/package.Service/Method" or "/package.Service/*". Descriptors come from `services=` or from the pool that
generated modules fill when they are imported; without one a method is covered as configured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

from semel.errors import ConfigurationError
from semel.grpc.rules import Method

__all__ = ["Methods", "split"]

_PLAIN: Final = Method()


def split(name: object) -> tuple[str, str]:
    """Service and method of a full name. Raises ConfigurationError."""
    if isinstance(name, str) and name.startswith("/"):
        service, _, method = name[1:].partition("/")
        if service and method and "/" not in method:
            return service, method
    raise ConfigurationError(
        f'{name!r} is no method: write "/package.Service/Method" or "/package.Service/*"'
    )


class Methods:
    """The covered methods. Built at start-up, where a mistake in a name is still cheap."""

    def __init__(
        self,
        methods: Iterable[str] | Mapping[str, Method] | None,
        exclude: Iterable[str] = (),
        services: Iterable[ServiceDescriptor] = (),
    ) -> None:
        if isinstance(methods, str) or isinstance(exclude, str):
            raise ConfigurationError("methods and exclude are collections of names: write them as a list")
        given = methods if isinstance(methods, Mapping) else dict.fromkeys(methods or (), _PLAIN)
        self._all = methods is None
        self._given = {split(name): _checked(name, method) for name, method in given.items()}
        self._excluded = {split(name) for name in exclude}
        self._services = {service.full_name: service for service in services}
        for service, name in (*self._given, *self._excluded):
            self._check_name(service, name)
        for (service, name), method in self._given.items():
            self._check_shape(service, name, method)

    def find(self, name: str) -> Method | None:
        """What is said about a method, None if it is not covered."""
        service, _, method = name.removeprefix("/").partition("/")
        if {(service, method), (service, "*")} & self._excluded:
            return None
        said = self._given.get((service, method)) or self._given.get((service, "*"))
        if said is None and not self._all:
            return None
        level = self._level(service, method)
        if level == MethodOptions.NO_SIDE_EFFECTS:
            return None
        said = said or _PLAIN
        if level == MethodOptions.IDEMPOTENT and said.required is None:
            return msgspec.structs.replace(said, required=False)
        return said

    def given(self) -> Iterable[tuple[str, Method]]:
        """What was said, by name, for those who check it."""
        return ((f"/{service}/{method}", said) for (service, method), said in self._given.items())

    def fields(self, name: str) -> Collection[str] | None:
        """The fields of a method's request, None where no descriptor tells."""
        service, _, method = name.removeprefix("/").partition("/")
        descriptor = self._descriptor(service, method)
        return None if descriptor is None else descriptor.input_type.fields_by_name.keys()

    def names(self, name: str) -> bool:
        """Whether a method is covered by its own name, so that it must not be passed over in silence."""
        service, _, method = name.removeprefix("/").partition("/")
        return (service, method) in self._given

    def _level(self, service: str, method: str) -> int:
        descriptor = self._descriptor(service, method)
        return 0 if descriptor is None else descriptor.GetOptions().idempotency_level

    def _service(self, name: str) -> ServiceDescriptor | None:
        if name in self._services:
            return self._services[name]
        try:
            return descriptor_pool.Default().FindServiceByName(name)
        except KeyError:
            return None

    def _descriptor(self, service: str, method: str) -> MethodDescriptor | None:
        found = self._service(service)
        return None if found is None else found.methods_by_name.get(method)

    def _check_name(self, service: str, method: str) -> None:
        found = self._service(service)
        if found is not None and method != "*" and method not in found.methods_by_name:
            known = ", ".join(found.methods_by_name)
            raise ConfigurationError(f"/{service}/{method}: {service} has no such method; it has {known}")

    def _check_shape(self, service: str, name: str, method: Method) -> None:
        found = self._descriptor(service, name)
        if found is None:
            return
        where = f"/{service}/{name}"
        if found.client_streaming and found.server_streaming:
            raise ConfigurationError(
                f"{where} streams both ways: one key cannot cover it. Leave it out, and give each message an id of its own"
            )
        if (found.client_streaming or found.server_streaming) and not method.stream:
            raise ConfigurationError(
                f"{where} streams: its messages would be recorded and sent when the handler has ended. Say "
                "Method(stream=True) if that is wanted, or leave it out"
            )
        if self._level(service, name) == MethodOptions.NO_SIDE_EFFECTS:
            raise ConfigurationError(
                f"{where} is declared NO_SIDE_EFFECTS: there is nothing to protect. Leave it out"
            )


def _checked(name: str, method: object) -> Method:
    if not isinstance(method, Method):
        raise ConfigurationError(f"methods[{name!r}] must be a Method(...), not {method!r}")
    if method.stream and name.endswith("/*"):
        raise ConfigurationError(f"{name}: streaming is opted in method by method, by its full name")
    return method
