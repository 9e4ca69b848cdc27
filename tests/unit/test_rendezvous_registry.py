"""Backends by name, plug-ins included: real distributions in a folder, imported only when asked for."""

import importlib
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import ConfigError, InternalError, RendezvousError
from rallypoint.rendezvous import (
    RendezvousHandlerRegistry,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from rallypoint.rendezvous.endpoint import BACKEND_ALIASES
from rallypoint.rendezvous.registry import BUILT_IN, ENTRY_POINT_GROUP


CREATORS = "stand_in_creators"
TABLE = {"tcpstore": f"{CREATORS}:tcpstore", "etcd": f"{CREATORS}:etcd"}


class Handler:
    def __init__(self, backend: str, params: Any = None) -> None:
        self.backend = backend
        self.params = params

    def get_backend(self) -> str:
        return self.backend


def creator(name: str) -> Callable[[Any], Any]:
    return lambda params: Handler(name, params)


def parameters(backend: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "node0", "job", 1, 1)


@pytest.fixture
def creators(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module the stand-in table names, imported already."""
    module = types.ModuleType(CREATORS)
    module.tcpstore, module.etcd = creator("tcpstore"), creator("etcd")
    monkeypatch.setitem(sys.modules, CREATORS, module)
    return module


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lay a distribution with entry points and a module into a folder on ``sys.path``."""
    modules: list[str] = []

    def install(
        name: str, points: dict[str, str], source: str = "", group: str = ENTRY_POINT_GROUP
    ) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = [f"{key} = {value}" for key, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        modules.append(f"{name}_module")
        (tmp_path / f"{name}_module.py").write_text(source)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for module in modules:
        sys.modules.pop(module, None)


HANDLER_SOURCE = """
class Handler:
    def get_backend(self):
        return "zoo"

def create(params):
    handler = Handler()
    handler.params = params
    return handler
"""


def with_plug_ins() -> RendezvousHandlerRegistry:
    return RendezvousHandlerRegistry(TABLE, aliases=BACKEND_ALIASES, group=ENTRY_POINT_GROUP)


def test_a_registered_creator_is_given_the_parameters() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", creator("mine"))
    params = parameters("mine")
    assert registry.create_handler(params).params is params
    assert registry.known() == ("mine",)


def test_the_same_creator_may_come_twice_and_another_one_may_not() -> None:
    registry = RendezvousHandlerRegistry()
    first, second = creator("mine"), creator("mine")
    registry.register("mine", first)
    registry.register("mine", first)
    with pytest.raises(ConfigError, match=r"'mine': registered already, with .*creator"):
        registry.register("mine", second)
    with pytest.raises(ConfigError, match="not empty"):
        registry.register("", first)


def test_a_method_is_the_same_creator_each_time_it_is_looked_up() -> None:
    class Factory:
        def create(self, params: Any) -> Any:
            return Handler("mine", params)

    factory, registry = Factory(), RendezvousHandlerRegistry()
    registry.register("mine", factory.create)
    registry.register("mine", factory.create)
    with pytest.raises(ConfigError):
        registry.register("mine", Factory().create)


def test_a_handler_of_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", creator("yours"))
    with pytest.raises(RendezvousError, match=r"'mine'.*'yours'"):
        registry.create_handler(parameters("mine"))


def test_what_is_no_handler_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", lambda _: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RendezvousError, match=r"'mine' returned NoneType"):
        registry.create_handler(parameters("mine"))


def test_an_error_of_the_creator_is_not_dressed_up() -> None:
    def create(params: Any) -> Any:
        raise ConfigError("--rdzv-endpoint", params.endpoint, "no")

    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    with pytest.raises(ConfigError, match="--rdzv-endpoint 'node0'"):
        registry.create_handler(parameters("mine"))


def test_an_unknown_backend_is_told_which_there_are_and_which_was_meant(
    install: Callable[..., None],
) -> None:
    install("zoo", {"zoo": "zoo_module:create"})
    registry = with_plug_ins()
    registry.register("mine", creator("mine"))
    with pytest.raises(ConfigError) as caught:
        registry.create_handler(parameters("ectd"))
    text = str(caught.value)
    assert "--rdzv-backend 'ectd'" in text
    assert "etcd (also etcd-v2), mine, tcpstore (also c10d, tcp), zoo" in text
    assert "did you mean etcd?" in text
    assert "zoo_module" not in sys.modules
    with pytest.raises(ConfigError, match="known: none"):
        RendezvousHandlerRegistry().create_handler(parameters("etcd"))


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("tcpstore", "tcpstore"),
        ("c10d", "tcpstore"),
        ("tcp", "tcpstore"),
        ("etcd", "etcd"),
        ("etcd-v2", "etcd"),
    ],
)
def test_built_in_backends_go_by_other_names_too(
    creators: types.ModuleType, asked: str, made: str
) -> None:
    assert with_plug_ins().create_handler(parameters(asked)).get_backend() == made


def test_a_built_in_handler_may_call_itself_by_the_alias(creators: types.ModuleType) -> None:
    creators.tcpstore = creator("c10d")
    assert with_plug_ins().create_handler(parameters("tcpstore")).get_backend() == "c10d"


def test_a_built_in_module_is_imported_when_its_name_is_asked_for_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_creators.py").write_text(HANDLER_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = RendezvousHandlerRegistry({"zoo": "lazy_creators:create"})
    registry.register("mine", creator("mine"))
    registry.known()
    with pytest.raises(ConfigError, match="built-in"):
        registry.register("zoo", creator("zoo"))
    assert "lazy_creators" not in sys.modules
    assert registry.create_handler(parameters("zoo")).get_backend() == "zoo"
    assert sys.modules.pop("lazy_creators")


@pytest.mark.parametrize("name", ["tcpstore", "c10d"])
def test_a_built_in_name_is_taken(creators: types.ModuleType, name: str) -> None:
    registry = with_plug_ins()
    with pytest.raises(ConfigError, match="tcpstore is a built-in"):
        registry.register(name, creator("tcpstore"))
    registry.register(name, creators.tcpstore)  # the very creator that is there


@pytest.mark.parametrize("target", ["no_such_module_here:create", "json:no_such_attribute"])
def test_a_built_in_backend_that_is_not_there_is_our_bug(target: str) -> None:
    registry = RendezvousHandlerRegistry({"etcd": target})
    with pytest.raises(InternalError, match=target) as caught:
        registry.create_handler(parameters("etcd"))
    assert isinstance(caught.value.__cause__, ImportError | AttributeError)


def test_a_plug_in_is_listed_without_being_imported_and_imported_when_asked_for(
    install: Callable[..., None],
) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    install("broken", {"broken": "broken_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    assert registry.known() == ("broken", "etcd", "tcpstore", "zoo")
    assert "zoo_module" not in sys.modules
    params = parameters("zoo")
    handler = registry.create_handler(params)
    assert handler.params is params and handler.get_backend() == "zoo"


def test_plug_ins_of_other_groups_and_of_a_registry_without_any_are_not_seen(
    install: Callable[..., None],
) -> None:
    install("other", {"other": "other_module:create"}, group="torchrun.handlers")
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    assert with_plug_ins().known() == ("etcd", "tcpstore", "zoo")
    assert RendezvousHandlerRegistry(TABLE).known() == ("etcd", "tcpstore")


@pytest.mark.parametrize(
    ("target", "source", "told"),
    [
        ("zoo_module:create", "import no_such_thing", "No module named 'no_such_thing'"),
        ("no_such_module:create", "", "No module named 'no_such_module'"),
        ("zoo_module:create", "", "create"),
        ("zoo_module:create", "1 / 0", "ZeroDivisionError"),
        ("zoo_module:create", "def create(:", "SyntaxError"),
    ],
)
def test_a_broken_plug_in_is_named_with_its_distribution_and_its_error(
    install: Callable[..., None], target: str, source: str, told: str
) -> None:
    install("zoo", {"zoo": target}, source)
    with pytest.raises(RendezvousError) as caught:
        with_plug_ins().create_handler(parameters("zoo"))
    text = str(caught.value)
    assert f"entry point zoo = {target} of distribution zoo 1.2" in text and told in text
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in text


def test_a_plug_in_that_is_no_function_is_refused(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, "create = 5")
    with pytest.raises(RendezvousError, match=r"distribution zoo 1.2 is int, not a function"):
        with_plug_ins().create_handler(parameters("zoo"))


def test_a_plug_in_whose_handler_has_another_name_is_refused(
    install: Callable[..., None],
) -> None:
    install("zoo", {"keeper": "zoo_module:create"}, HANDLER_SOURCE)
    with pytest.raises(RendezvousError, match=r"'keeper'.*'zoo'"):
        with_plug_ins().create_handler(parameters("keeper"))


def test_two_plug_ins_with_one_name_are_not_chosen_between(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, HANDLER_SOURCE)
    install("ark", {"zoo": "ark_module:create"}, HANDLER_SOURCE)
    with pytest.raises(ConfigError, match=r"more than one") as caught:
        with_plug_ins().create_handler(parameters("zoo"))
    assert "distribution zoo 1.2" in str(caught.value)
    assert "distribution ark 1.2" in str(caught.value)


@pytest.mark.parametrize("name", ["etcd", "c10d"])
def test_a_plug_in_cannot_take_a_built_in_name(
    creators: types.ModuleType,
    install: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    install("zoo", {name: "zoo_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    assert isinstance(registry.create_handler(parameters(name)), Handler)
    with caplog.at_level(logging.WARNING):
        assert registry.known() == ("etcd", "tcpstore")
    assert "distribution zoo 1.2 is ignored" in caplog.text


def test_a_registered_creator_goes_before_a_plug_in(install: Callable[..., None]) -> None:
    install("zoo", {"zoo": "zoo_module:create"}, "raise RuntimeError('imported')")
    registry = with_plug_ins()
    registry.register("zoo", creator("zoo"))
    assert isinstance(registry.create_handler(parameters("zoo")), Handler)
    assert registry.known() == ("etcd", "tcpstore", "zoo")


def test_the_shared_registry_knows_the_built_in_backends() -> None:
    assert {"etcd", "file", "memory", "static", "tcpstore"} <= set(
        rendezvous_handler_registry.known()
    )
    for name, target in BUILT_IN.items():
        assert target == f"rallypoint.rendezvous.create:{name}"
    assert set(BACKEND_ALIASES.values()) <= set(BUILT_IN)
    assert not set(BACKEND_ALIASES) & set(BUILT_IN)


def test_importing_the_package_looks_for_no_plug_ins() -> None:
    program = (
        "import sys; import rallypoint.rendezvous as r;"
        "assert 'importlib.metadata' not in sys.modules, 'entry points';"
        "assert 'torch' not in sys.modules, 'torch';"
        "assert 'rallypoint.rendezvous.create' not in sys.modules, 'backends';"
        "assert r.rendezvous_handler_registry is not None"
    )
    subprocess.run([sys.executable, "-S", "-c", _path() + program], check=True, timeout=240)


def _path() -> str:
    # -S: site's .pth files of other packages import what they like.
    folder = Path(importlib.import_module("rallypoint").__file__ or "").parents[1]
    return f"import sys; sys.path.insert(0, {str(folder)!r});"
