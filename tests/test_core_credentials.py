"""Secrets in recipes and addresses are refused, and no message quotes them."""

import pytest

from ragr1_actors.core.credentials import is_secret, refuse_credentials
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.training.algorithm_config import AlgorithmConfig


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA123:s3cret@bucket/runs",
        "https://me:s3cret@10.0.0.2:8000/retrieve",
        "abfs://:s3cret@account.dfs.core.windows.net/runs",
        "https://api.example.com/search?q=1&api_key=s3cret",
        "https://account.blob.core.windows.net/runs?sig=s3cret",
        "see http://me:s3cret@host, and more",
        "s3://AKIA123:s3cret/with/slashes@bucket/runs",
        "s3://AKIA123:s3cret?and#more@bucket/runs",
        "https://s3cret@host/retrieve",
    ],
)
def test_an_address_with_a_secret_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--run-dir: the address holds a password or a key") as caught:
        refuse_credentials(address, "--run-dir")
    assert "s3cret" not in str(caught.value)
    for section, key in (("environment", "tasks"), ("retrieval", "index"), ("policy", "model")):
        with pytest.raises(ConfigError, match=f"{section}.{key}: the address holds"):
            AlgorithmConfig().override([f"{section}.{key}='{address}'"]).freeze()


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/a:b@c",
        "abfs://container@account.dfs.core.windows.net/runs",
        "gs://bucket/runs?region=a",
        "/a:b@c",
        "http://h:80/a@b",
    ],
)
def test_other_addresses_are_not(address: str) -> None:
    refuse_credentials(address, "--run-dir")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("{url: 'http://a', token: s3cret}", "retrieval.options.token"),
        (
            "{url: 'http://a', headers: {X-Subscription-Token: s3cret}}",
            "retrieval.options.headers.X-Subscription-Token",
        ),
        ("{url: 'http://a', headers: {Authorization: Bearer s3cret}}", "retrieval.options.headers.Authorization"),
        ("{url: 'http://a', params: {api_key: s3cret}}", "retrieval.options.params.api_key"),
        ("{url: 'http://a', params: {deep: [{key: s3cret}]}}", r"retrieval.options.params.deep\[0\].key"),
    ],
)
def test_an_option_that_is_a_secret_is_refused(options: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: a secret in a recipe would be stored and printed") as caught:
        AlgorithmConfig().override(["retrieval.type=web", f"retrieval.options={options}"])
    assert "s3cret" not in str(caught.value)


def test_the_engine_takes_no_token() -> None:
    with pytest.raises(ConfigError, match=r"env_runners\.engine_options\.hf_token: a secret"):
        AlgorithmConfig().env_runners(engine_options={"hf_token": "s3cret"}).freeze()


def test_names_of_variables_and_other_words_are_no_secrets() -> None:
    for name in ("key_env", "token_env", "key_header", "keywords", "max_tokens", "author", "monkey", "signal"):
        assert not is_secret(name)
    for name in ("key", "API-KEY", "access_token", "Cookie", "client.secret", "sig"):
        assert is_secret(name)


@pytest.mark.timeout(60)  # for each of these a pattern that goes back took hours
@pytest.mark.parametrize("unit", ["a", "?", "&", "http://a:b,", "http://", "https://a", "://", ":", "a.", "a@", " "])
def test_a_long_text_is_read_once(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    assert not is_secret(text)
    refuse_credentials(text, "--run-dir")
    refuse_credentials(f"s3://{text} s3://x", "--run-dir")
