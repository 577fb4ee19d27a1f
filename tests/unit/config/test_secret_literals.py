"""Which literals of `env` are secrets, and which only look like it."""

from __future__ import annotations

import random
import string

import pytest

from perdure.training.config.secrets import is_random, why_secret

KEY = "its value has the form of a key"
NAME = "its name marks a secret"
RANDOM = "its value looks random"
SECRETS = [
    ("ANYTHING", "AKIAIOSFODNN7EXAMPLE", KEY),
    ("ANYTHING", "hf_abcdefghijklmnopqrstuvwx", KEY),
    ("ANYTHING", "ghp_0123456789012345678901234567890123456", KEY),
    ("ANYTHING", "glpat-abcdefghijklmnopqrst", KEY),
    ("ANYTHING", "xoxb-123456789012-abcdefghij", KEY),
    ("ANYTHING", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY.SflKxwRJSMeKKF2QT4fw", KEY),
    ("ANYTHING", "-----BEGIN RSA PRIVATE KEY-----\nMIIE", KEY),
    ("HTTPS_PROXY", "http://me:hunter2@proxy:3128", KEY),
    ("NCCL_DEBUG", "hf_abcdefghijklmnopqrstuvwx", KEY),
    ("HF_TOKEN", "abcdef", NAME),
    ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567", NAME),
    ("DB_PASSWORD", "hunter2", NAME),
    ("DB_PASSWORD", "123456", NAME),
    ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", NAME),
    ("SERVICE", "q7Xk2PvL9sWm4TzB8nRc5YhD", RANDOM),
    ("SERVICE", "user:q7Xk2PvL9sWm4TzB8nRc5YhD", RANDOM),
]
ORDINARY = [
    ("HCCL_WHITELIST_FILE", "/etc/hccl/white.json"),
    ("HCCL_OP_RETRY_PARAMS", "MaxCnt:3,HoldTime:5000,IntervalTime:1000"),
    ("NCCL_SOCKET_IFNAME", "=eth0,bond0"),
    ("NCCL_IB_GID_INDEX", "3"),
    ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
    ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
    ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.9"),
    ("TORCHINDUCTOR_CACHE_DIR", "/cache/q7Xk2PvL9sWm4TzB8nRc5YhD"),
    ("LD_LIBRARY_PATH", "/usr/local/Ascend/driver/lib64:/usr/local/lib"),
    ("MA_JOB_DIR", "/home/ma-user/modelarts/user-job-dir"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("MAX_TOKENS", "4096"),
    ("NUM_TOKENS", "1e9"),
    ("TRAIN_TOKENS", "1000000000000"),
    ("TOKENS_PER_BATCH", "4194304"),
    ("EOS_TOKEN", "<|endoftext|>"),
    ("PAD_TOKEN", "[PAD]"),
    ("SORT_KEY", "length"),
    ("HF_TOKEN_PATH", "/run/secrets/hf"),
    ("HF_TOKEN", ""),
    ("SSH_PRIVATE_KEY", "/run/secrets/id_ed25519"),
    ("MODEL", "Qwen2.5-72B-Instruct-Megatron-v1"),
    ("ARCHITECTURE", "Qwen2VLForConditionalGeneration"),
    ("ARCHITECTURE", "DeepseekV3ForCausalLMWithMTPHeads"),
    ("GIT_COMMIT", "c312e6dd9155f1a7b01faeb33f189d484ce3cabc"),
    ("IMAGE", "swr.cn-north-4.myhuaweicloud.com/team/train@sha256:" + "0a1b2c3d" * 8),
    ("RUN_UUID", "123e4567-e89b-12d3-a456-426614174000"),
    ("WANDB_BASE_URL", "https://wandb.example.com/api"),
    ("NO_PROXY", "localhost,127.0.0.1,.svc.cluster.local"),
    ("PACE_FILE", "/scratch/pytest-77/perdure0/main-job.pace"),
    ("START", "2026-11-23T07:30:00Z"),
    ("XLA_FLAGS", "--xla_dump_to=/tmp/dump --xla_gpu_autotune_level=0"),
]


@pytest.mark.parametrize(("name", "value", "why"), SECRETS, ids=[one[0] for one in SECRETS])
def test_a_literal_that_is_a_secret_is_told_by_form_name_or_randomness(name, value, why):
    assert why_secret(name, value) == why


@pytest.mark.parametrize(("name", "value"), ORDINARY, ids=[name for name, _ in ORDINARY])
def test_settings_paths_numbers_and_words_are_no_secrets(name, value):
    assert why_secret(name, value) is None


def test_nearly_every_random_text_of_letters_and_digits_is_noticed():
    draw = random.Random(1)  # noqa: S311 no key is drawn
    letters = string.ascii_letters + string.digits
    texts = ["".join(draw.choices(letters, k=32)) for _ in range(500)]
    assert sum(map(is_random, texts)) >= 0.95 * len(texts)
