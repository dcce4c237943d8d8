"""The trainer ranks: LoRA agents on one frozen base, FSDP2 data parallel, policy-gradient steps.

`selfplay.training.config` is light and says how a rank is started; everything else here imports torch.
"""
