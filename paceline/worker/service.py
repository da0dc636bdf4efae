"""WorkerService: what a worker says of itself, the same in both tiers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.core.request import Priority
from paceline.runtime.wire_internal import fingerprint_to_proto
from paceline.runtime.wire_pace import pace_to_proto, pending_to_proto
from paceline.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from paceline.worker.worker import Worker

# Load changes with every step; to look so often is enough to place by.
_REPORT_EVERY_S = 0.05
# Whoever hears nothing for much longer may take the worker for frozen.
_HEARTBEAT_S = 1.0


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one worker's facts and load."""

    def __init__(self, worker: Worker, role: inference_pb2.WorkerRole) -> None:
        self._worker = worker
        self._role = role

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.GetInfoResponse:
        """What the worker is."""
        worker, loaded = self._worker, self._worker.loaded
        capacity = loaded.capacity
        return worker_pb2.GetInfoResponse(
            worker_id=worker.key.worker_id,
            role=self._role,
            boot_epoch=worker.key.boot_epoch,
            fingerprint=fingerprint_to_proto(loaded.fingerprint),
            model_id=worker.model_id,
            max_model_tokens=capacity.max_model_tokens,
            vocab_size=loaded.vocab_size,
            num_blocks=capacity.num_blocks,
            block_bytes=loaded.layout.block_bytes,
            num_kv_tokens=capacity.num_tokens,
            num_2k_requests=capacity.num_requests,
            own_max_model_tokens=capacity.own_max_model_tokens,
            max_num_batched_tokens=worker.scheduling.max_num_batched_tokens,
            fast_lane_share=worker.scheduling.fast_lane_share,
            fast_lane_prompt_tokens=worker.scheduling.fast_lane_prompt_tokens,
            fast_lane_output_tokens=worker.scheduling.fast_lane_output_tokens,
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """The load now, after each change, and once a second."""
        reported, silent_s = None, 0.0
        while True:
            load = self._load()
            if load != reported or silent_s >= _HEARTBEAT_S:
                yield load
                reported, silent_s = load, 0.0
            await asyncio.sleep(_REPORT_EVERY_S)
            silent_s += _REPORT_EVERY_S

    async def GetExpertLoad(
        self, request: worker_pb2.GetExpertLoadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.GetExpertLoadResponse:
        """What each expert of each layer has been given."""
        layers = [
            worker_pb2.ExpertLoad(layer=each.layer, num_tokens=each.counts, imbalance=each.imbalance)
            for each in self._worker.engine.stats.expert_tokens
        ]
        return worker_pb2.GetExpertLoadResponse(layers=layers)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.DrainResponse:
        """Takes nothing new from now on."""
        self._worker.draining.set()
        return worker_pb2.DrainResponse()

    def _load(self) -> worker_pb2.WatchLoadResponse:
        worker, stats = self._worker, self._worker.engine.stats
        queues = stats.queues
        return worker_pb2.WatchLoadResponse(
            num_free_blocks=stats.num_free_blocks,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_pending_tokens=stats.num_pending_tokens,
            num_steps=stats.num_steps,
            num_blocks_pulled=worker.num_blocks_pulled,
            draining=worker.draining.is_set(),
            num_preemptions=stats.num_preemptions,
            num_leases=worker.leases.stats().num_active,
            max_steps_to_release=stats.max_steps_to_release,
            cooling_down=queues.is_cooling,
            num_waiting_realtime=queues.num_waiting_by_priority[Priority.REALTIME],
            num_waiting_standard=queues.num_waiting_by_priority[Priority.STANDARD],
            num_waiting_batch=queues.num_waiting_by_priority[Priority.BATCH],
            pace=None if stats.pace is None else pace_to_proto(stats.pace),
            pending_fast=pending_to_proto(stats.pending.fast),
            pending_normal=pending_to_proto(stats.pending.normal),
            max_seats=queues.max_seats,
            is_blocked=stats.is_blocked,
        )
