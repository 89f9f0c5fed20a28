"""What looks like a secret is not shown; what does not is, and nothing else of a text changes."""

from __future__ import annotations

import pytest

from smp_config.formats.secrets import MASK, is_secret_name, mask_secrets, masked_text, masked_words, shown_value
from smp_config.mpi_options import parse_mpi_options

AWS_ID = "AKIA" + "ABCDEFGH12345678"
AWS_KEY = "wJalrXUtnFEMIK7MDENGbPxRfiCY" + "EXAMPLEKEY/4"
HF = "hf_" + "abcDEF0123456789abcd"


@pytest.mark.parametrize(
    "name",
    ["hub_token", "apiKey", "API_KEY", "aws-secret-access-key", "password", "db.passwd", "HF_TOKEN", "credentials"],
)
def test_names_that_say_so(name: str) -> None:
    assert is_secret_name(name)
    assert masked_words(["train.py", f"--{name}", "s3cr3t-value", "--lr", "0.1"]) == [
        "train.py",
        f"--{name}",
        MASK,
        "--lr",
        "0.1",
    ]
    assert masked_text(f"x {name}=s3cr3t-value, y=2") == f"x {name}={MASK}, y=2"
    assert "s3cr3t" not in shown_value(None, {"outer": {name: "s3cr3t-value"}})


@pytest.mark.parametrize("name", ["monkey", "keyboard", "epochs", "tokenizer", "model_dir", "secretary"])
def test_names_that_only_contain_the_letters(name: str) -> None:
    assert mask_secrets(name, "value-1") == "value-1"


@pytest.mark.parametrize("value", ["512", "1e6", "true", "None", "<pad>", "[PAD]", "<|endoftext|>", ""])
def test_a_token_of_a_vocabulary_is_no_secret(value: str) -> None:
    assert mask_secrets("max_token", value) == value


def test_a_password_is_one_whatever_it_is() -> None:
    assert mask_secrets("password", "1234") == MASK


@pytest.mark.parametrize(
    "secret",
    [
        AWS_ID,
        AWS_KEY,
        HF,
        "ghp_" + "a1" * 18,
        "sk-" + "Ab1" * 12,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    ],
)
def test_values_by_their_form(secret: str) -> None:
    assert masked_text(f"before {secret}") == f"before {MASK}"
    assert mask_secrets("anything", secret) == MASK
    assert masked_words(["train.py", f"--x={secret}"]) == ["train.py", f"--x={MASK}"]


def test_a_password_in_an_address() -> None:
    assert masked_text("https://me:pass@host/x?y=1") == f"https://{MASK}@host/x?y=1"


@pytest.mark.parametrize(
    "text",
    [
        "da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "s3://bucket/some/prefix/model.tar.gz",
        "/opt/ml/input/data/train",
        "meta-llama/Llama-3.1-8B-Instruct",
        "ddp=True,partitions=2",
        "lr=0.1 warmup: 3",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert masked_text(text) == text


def test_options_of_mpirun_are_shown_without_and_passed_with_them() -> None:
    (option,) = parse_mpi_options(f"-x HF_TOKEN={HF}")
    assert HF not in str(option)
    assert option.arguments() == ["-x", f"HF_TOKEN={HF}"]
