"""A trainer class in the manner of Hugging Face: the loss is the model's, the loop is hidden."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset


@dataclass
class Arguments:
    learning_rate: float = 5e-4
    batch_size: int = 16
    steps: int = 400
    max_grad_norm: float = 1.0


class Tokens(Dataset):
    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(100, (count, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 100)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.encoder(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Trainer:
    def __init__(self, model: nn.Module, args: Arguments, train_dataset: Dataset) -> None:
        self.model, self.args, self.train_dataset = model, args, train_dataset
        self.optimizer = None

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=self.args.batch_size, shuffle=True)

    def create_optimizer(self) -> None:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = AdamW(
            [
                {"params": decayed, "weight_decay": 0.01},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.args.learning_rate,
            betas=(0.9, 0.99),
        )

    def compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(**inputs)
        return outputs["loss"]

    def training_step(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    def train(self) -> None:
        self.create_optimizer()
        loader = self.get_train_dataloader()
        step = 0
        while step < self.args.steps:
            for inputs in loader:
                self.training_step(self.model, inputs)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if step >= self.args.steps:
                    break


def main() -> None:
    torch.manual_seed(0)
    Trainer(TinyModel(), Arguments(), Tokens(512, 16)).train()


if __name__ == "__main__":
    main()
