"""TensorBoard: an event file of our own. Needs the package tensorboard, not torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.ui.loggers.run_log import PREFIX, MetricLog, MetricPoint, RunConclusion


class TensorBoardLog(MetricLog):
    """Writes into `target`, or the run folder's own `tensorboard`."""

    def __init__(self, target: str, run: Path, joined: None = None) -> None:
        del joined  # an event file is always our own
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(target or str(run / "tensorboard"))

    def points(self, points: Sequence[MetricPoint]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=v) for name, v in point.values.items()]
            self._add(Summary(value=values), point.step, point.unix_s)
        self._writer.flush()

    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=v) for name, v in conclusion.values.items()]
        self._add(Summary(value=[*scalars, _text(conclusion.text)]), step, time.time())

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int, unix_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=unix_s, step=step, summary=summary))


def _text(text: str) -> Any:
    """As the page "Text" expects it: a string tensor that names its plugin."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return Summary.Value(
        tag=f"{PREFIX}/verdict",
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape),
    )
