"""Accelerators: those of this worker, and where a tensor goes at a peer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from rallypoint._core import env
from rallypoint.errors import RpcError
from rallypoint.rpc.device_map import Device
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.options import NativeRpcBackendOptions
from rallypoint.rpc.serialization import payload as payloads
from rallypoint.rpc.serialization.cuda_ipc import Way, visible_names, way_to
from rallypoint.rpc.serialization.tensor_writer import Devices, TensorWriter
from rallypoint.rpc.worker_info import WorkerInfo


class PeerDevices:
    """The target devices of tensors that are sent to peers."""

    def __init__(self, options: NativeRpcBackendOptions, roster: Roster) -> None:
        self._options = options
        self._roster = roster

    def towards(self, to: WorkerInfo) -> Devices | None:
        """The device map for a peer: this worker's, or else the reverse of the peer's."""
        group = self._roster.group
        assert group is not None
        own = self._options.device_maps.get(to.name)
        if own is None:
            with contextlib.suppress(RpcError):
                theirs = group.find(to.name).devices.maps.get(group.me.name)
                if theirs:
                    own = {there: here for here, there in theirs.items()}
        if not own:
            return None
        pairs = own

        def target(device: torch.device) -> str:
            found = pairs.get(Device.parse(device))
            if found is None:
                known = ", ".join(f"{a}: {b}" for a, b in pairs.items())
                raise ValueError(
                    f"the device map for {to.name!r} has no entry for {device} (it has {known});"
                    " add one with options.set_device_map"
                )
            return str(found)

        def way(device: torch.device, target: str, nbytes: int) -> Way:
            options = self._options
            decide = way_to(
                group.me, group.find(to.name), options.transports, enabled=options.cuda_ipc
            )
            return decide(device, target, nbytes)

        return Devices(target, way)


class PeerPickler:
    """Pickles values for peers.

    Args:
        devices: the peers' devices.
    """

    def __init__(self, options: NativeRpcBackendOptions, devices: PeerDevices) -> None:
        self._options = options
        self._devices_for = devices.towards

    def dumps(
        self, obj: Any, to: WorkerInfo, recorder: payloads.Records | None = None
    ) -> tuple[bytes, TensorWriter]:
        return payloads.dumps(
            obj,
            to=to.id,
            devices=self._devices_for(to),
            by_value=self._options.pickle_by_value,
            recorder=recorder,
        )


def node_devices(options: NativeRpcBackendOptions) -> Any:
    """The devices of this worker, for its record in the group."""
    from rallypoint.rpc.device_map import NodeDevices

    counts = {"cuda": torch.cuda.device_count()} if torch.cuda.is_available() else {}
    visible: tuple[str, ...] = ()
    if counts and options.cuda_ipc and torch.version.cuda:
        setting, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")
        visible = visible_names(counts["cuda"], setting, order)
    return NodeDevices(
        counts=counts,
        devices=tuple(options.devices),
        maps=options.device_maps,
        visible=visible,
    )
