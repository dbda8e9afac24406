import torch
from torch import nn

batch_size = 8
length, width = 64, 128
torch.manual_seed(0)
embed = nn.Embedding(1000, width)
layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
head = nn.Linear(width, 1000)
model = nn.ModuleList([embed, encoder, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(40):
    tokens = torch.randint(0, 1000, (batch_size, length))
    hidden = encoder(embed(tokens))
    logits = head(hidden)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
