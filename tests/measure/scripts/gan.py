"""Two optimizers in a step."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
of_judge = torch.optim.Adam(judge.parameters())
of_maker = torch.optim.Adam(maker.parameters())
for _ in range(18):
    noise = torch.randn(16, 4)
    loss_judge = judge(maker(noise).detach()).mean() - judge(torch.randn(16, 8)).mean()
    of_judge.zero_grad()
    loss_judge.backward()
    of_judge.step()
    loss_maker = -judge(maker(noise)).mean()
    of_maker.zero_grad()
    loss_maker.backward()
    of_maker.step()
    print(loss_judge.item().hex(), loss_maker.item().hex())
