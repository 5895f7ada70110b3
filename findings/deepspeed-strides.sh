#!/usr/bin/env bash
# DeepSpeed's optimizers for a CPU, in place of PyTorch's as its maintainers suggest (DeepSpeed
# #479), and a convolution in channels_last. They are compiled when they are first used.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
command -v c++ >/dev/null || {
  echo "no compiler here"
  exit 77
}
install torch==2.13.0 deepspeed==0.19.8 numpy==2.4.6 ninja==1.13.2 setuptools==80.9.0

export TORCH_EXTENSIONS_DIR=$folder/extensions MAX_JOBS=1 DS_ACCELERATOR=cpu
PATH=$folder/environment/bin:$PATH
cat >"$folder/train.py" <<'PYTHON'
import deepspeed
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam


def trained(kind, memory_format, **options):
    """By how much one step with a rate of 0.1 changes the weight and the bias of a convolution."""
    layer = torch.nn.Conv2d(4, 8, 3).to(memory_format=memory_format)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer = kind(layer.parameters(), lr=0.1, **options)
    layer(torch.ones(1, 4, 5, 5)).sum().backward()
    optimizer.step()
    changes = [(old - new).abs().max().item() for old, new in zip(before, layer.parameters())]
    return "weight {:.1f}, bias {:.1f}".format(*changes)


print(deepspeed.__version__.split("+")[0])
for kind in (torch.optim.Adam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad):
    for name in ("contiguous_format", "channels_last"):
        print(f"{kind.__name__}, {name}:", trained(kind, getattr(torch, name)))
PYTHON
seen=$("$python" -W ignore "$folder/train.py" 2>"$errors" |
  grep -E '^[0-9]+\.[0-9.]+$|^(Adam|DeepSpeedCPU[A-Za-z]*),')
verdict 'all weights are trained, or the optimizer refuses them' "$seen" \
  "0.19.8
Adam, contiguous_format: weight 0.1, bias 0.1
Adam, channels_last: weight 0.1, bias 0.1
DeepSpeedCPUAdam, contiguous_format: weight 0.1, bias 0.1
DeepSpeedCPUAdam, channels_last: weight 0.0, bias 0.1
DeepSpeedCPUAdagrad, contiguous_format: weight 0.1, bias 0.1
DeepSpeedCPUAdagrad, channels_last: weight 0.0, bias 0.1"
