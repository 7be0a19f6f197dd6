"""What the GPUs of this machine do, without torch and without a CUDA context of ours."""
