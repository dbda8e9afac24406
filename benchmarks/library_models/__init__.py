"""Models of well-known libraries, each a plain training script in fp32 eager; sizes suit an H200.

Every script has build(tiny), make_batches(size, device, tiny) and loss_of(model, batch), trains
with AdamW, and runs on a CPU with `--device cpu --tiny --batch 2`.
"""

# No rule of predict/ was made or mended with these in view.
UNSEEN = (
    *("qwen", "dinov2", "electra", "mnasnet"),
    *("raft", "efficientnet_v2", "patchtst", "fnet", "graph_transformer"),
)
# The most telling ones first: a run that ends early has them.
MODELS = (
    "llama",
    "swin",
    "convnext",
    "whisper",
    "sage",
    "resnet50",
    "bert",
    "mobilenet",
    "vit",
    "gat",
    "t5",
    "efficientnet",
    "regnet",
    "neox",
    "segformer",
    "gin",
    "deeplab",
    "wav2vec2",
    "densenet",
    "r3d",
    "bart",
    "maxvit",
    "mixtral",
    "pna",
    "shufflenet",
    "deberta",
    "clip",
    "perceiver",
    *UNSEEN,
)
