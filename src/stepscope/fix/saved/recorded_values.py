"""Which content each storage of a recorded pass holds, and what operators may start from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.private_copies import copied_bytes
from stepscope.fix.saved.step_record import HoldingOption, StepValue

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class RecordedValues:
    """Which value each storage holds now."""

    owned: frozenset[int]
    checked: set[int]  # of weights that operators start from without a copy
    records: list[StepValue] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    references: list[StorageWeakRef] = field(default_factory=list)  # keep addresses unique
    copies: dict[tuple[int, Geometry], int] = field(default_factory=dict)  # of a value's views
    given: set[int] = field(default_factory=set)  # storages that were there before the pass

    def of(self, tensor: torch.Tensor) -> int:
        known = self.current.get(tensor.untyped_storage()._cdata)
        known = self.add(tensor, None, "") if known is None else known
        if isinstance(tensor, torch.nn.Parameter) and not self.records[known].owned:
            self.records[known] = replace(self.records[known], owned=True)  # gathered by FSDP
        return known

    def add(self, tensor: torch.Tensor, producer: int | None, module: str) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        before = self.current.get(address)
        if before is None:
            self.references.append(StorageWeakRef(storage))
            number = len(self.references)
            if producer is None:
                self.given.add(number)
        else:
            self.records[before] = replace(self.records[before], overwritten=True)
            number = self.records[before].storage
            self.checked.discard(address)
        self.current[address] = len(self.records)
        self.records.append(
            StepValue(
                storage=number,
                size_bytes=storage.nbytes(),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                module=module,
                producer=producer,
                owned=address in self.owned,
                overwritten=False,
            )
        )
        return len(self.records) - 1

    def must_be_copied(self, tensor: torch.Tensor) -> bool:
        """Whether it may change until backward: the pass did not make it, and it is no weight that
        only an optimizer changes."""
        is_given = self.records[self.of(tensor)].storage in self.given
        return is_given and tensor.untyped_storage()._cdata not in self.checked

    def copy_of(self, tensor: torch.Tensor) -> int:
        """What followers start from instead."""
        value, geometry = self.of(tensor), Geometry.of(tensor)
        known = self.copies.get((value, geometry))
        if known is not None:
            return known
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        copy = replace(
            self.records[value],
            storage=len(self.references),
            size_bytes=copied_bytes(tensor) or 0,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            producer=None,
            owned=False,
            overwritten=False,
            needed_again=False,
            copied=True,
        )
        self.copies[value, geometry] = len(self.records)
        self.records.append(copy)
        return self.copies[value, geometry]

    def need(self, values: Iterable[int]) -> None:
        """To repeat the operator that made them."""
        for number in values:
            self.records[number] = replace(self.records[number], needed_again=True)

    def with_options(self, options: dict[int, tuple[HoldingOption, ...]]) -> list[StepValue]:
        return [
            replace(record, options=options.get(number, ()))
            for number, record in enumerate(self.records)
        ]

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """A parameter that is only there during the pass: FSDP may free it before backward asks."""
        unknown = isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 0
        return unknown and tensor.untyped_storage()._cdata not in self.owned
