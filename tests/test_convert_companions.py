"""The small files of a bundle: config, tokenizer, voices, card, licences."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import synthetic

from warble_mlx import __version__
from warble_mlx.convert import convert
from warble_mlx.errors import CheckpointError

VOICES = {
    "default": 7,
    "voices": [
        {
            "id": 7,
            "name": "Ada",
            "token": "<|speaker:7|>",
            "language": "en",
            "description": "calm",
            "licence": "kept although unknown",
        }
    ],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return synthetic.write_source(tmp_path / "source")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_config_is_written_out(source: Path, tmp_path: Path) -> None:
    fields = synthetic.config()
    for name in ("fast_dim", "fast_n_head", "fast_intermediate_size", "ras_top_p"):
        del fields[name]
    synthetic.write_json(source / "config.json", {**fields, "auto_map": {"AutoModel": "x.Y"}})
    convert(source, tmp_path / "out", source_id="someone/model", revision="abc")
    config = read(tmp_path / "out" / "config.json")
    assert config["fast_dim"] == 64
    assert config["fast_n_head"] == 4
    assert config["fast_intermediate_size"] == 128
    assert config["ras_top_p"] == 0.9
    assert "auto_map" not in config
    assert {name: config[name] for name in synthetic.CODEC} == synthetic.CODEC
    assert config["codec_dtype"] == "float16"
    assert config["generation"] == {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "max_new_tokens": 300,
    }


def test_the_longest_text_is_kept(source: Path, tmp_path: Path) -> None:
    synthetic.write_json(source / "processor_config.json", {"max_text_chars": 170})
    convert(source, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    for name in ("out", "again"):
        assert read(tmp_path / name / "config.json")["generation"]["max_text_chars"] == 170


def test_plain_punctuation_survives_a_second_conversion(source: Path, tmp_path: Path) -> None:
    synthetic.write_json(source / "generation_config.json", {"plain_punctuation": True})
    convert(source, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    for name in ("out", "again"):
        assert read(tmp_path / name / "config.json")["generation"]["plain_punctuation"] is True


def test_provenance(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", source_id="someone/model", revision="abc")
    config = read(tmp_path / "out" / "config.json")
    assert config["provenance"] == report.provenance
    assert report.provenance == {
        "source": "someone/model",
        "revision": "abc",
        "converter": f"warble-mlx {__version__}",
        "source_files": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()
        },
    }


def test_provenance_of_a_bundle_is_kept(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one", source_id="someone/model", revision="abc")
    kept = convert(tmp_path / "one", tmp_path / "two").provenance
    assert (kept["source"], kept["revision"]) == ("someone/model", "abc")
    own = convert(tmp_path / "one", tmp_path / "three", source_id="me/copy").provenance
    assert (own["source"], own["revision"]) == ("me/copy", None)


def test_no_local_path_is_written(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", source_id=str(source))
    for name in ("config.json", "README.md", "voices.json"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()
    assert read(tmp_path / "out" / "config.json")["provenance"]["source"] == "source"


def test_zero_temperature_stays_zero(source: Path, tmp_path: Path) -> None:
    synthetic.write_json(source / "generation_config.json", {"temperature": 0, "top_k": 3})
    convert(source, tmp_path / "out")
    assert read(tmp_path / "out" / "config.json")["generation"] == {
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.9,
        "max_new_tokens": 512,
    }
    convert(tmp_path / "out", tmp_path / "again")
    assert read(tmp_path / "again" / "config.json")["generation"]["temperature"] == 0


@pytest.mark.parametrize("value", ["hot", -1, True, None, [1]])
def test_generation_settings_must_be_numbers(source: Path, tmp_path: Path, value: Any) -> None:
    synthetic.write_json(source / "generation_config.json", {"temperature": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature is"):
        convert(source, tmp_path / "out")


def edit_tokenizer(source: Path, edit: Any) -> None:
    tokenizer = read(source / "tokenizer.json")
    edit(tokenizer)
    synthetic.write_json(source / "tokenizer.json", tokenizer)


def swap(tokenizer: dict[str, Any], one: str, two: str) -> None:
    tokens = {token["content"]: token for token in tokenizer["added_tokens"]}
    tokens[one]["content"], tokens[two]["content"] = two, one


def test_tokenizer_is_copied_as_it_is(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("token", ["<|im_end|>", "<|semantic:0|>", "<|semantic:41|>"])
def test_tokenizer_ids_must_be_those_of_the_config(
    source: Path, tmp_path: Path, token: str
) -> None:
    edit_tokenizer(source, lambda t: swap(t, token, "<|pad|>"))
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "out")
    assert f"to {token}; config.json says" in str(caught.value)


def test_tokenizer_without_voice(source: Path, tmp_path: Path) -> None:
    def edit(tokenizer: dict[str, Any]) -> None:
        for token in tokenizer["added_tokens"]:
            token["content"] = token["content"].replace("<|voice|>", "<|sound|>")

    edit_tokenizer(source, edit)
    with pytest.raises(CheckpointError, match=r"has no token <\|voice\|>: it belongs to another"):
        convert(source, tmp_path / "out")


def test_tokenizer_with_ids_beyond_the_table(source: Path, tmp_path: Path) -> None:
    def edit(tokenizer: dict[str, Any]) -> None:
        last = tokenizer["added_tokens"][-1]
        for i in range(1, 4):
            more = {**last, "id": last["id"] + i, "content": f"<|more:{i}|>"}
            tokenizer["added_tokens"].append(more)

    edit_tokenizer(source, edit)
    vocab_size = synthetic.config()["vocab_size"]
    said = rf"ids up to {vocab_size}, but vocab_size is {vocab_size}"
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("text", ["{}", "", "<html>", '{"version": "1.0"}'])
def test_no_tokenizer_at_all(source: Path, tmp_path: Path, text: str) -> None:
    (source / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        convert(source, tmp_path / "out")


def test_voices_are_copied(source: Path, tmp_path: Path) -> None:
    synthetic.write_json(source / "voices.json", VOICES)
    convert(source, tmp_path / "out", source_id="scrappylabsai/warble")
    assert read(tmp_path / "out" / "voices.json") == VOICES


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"default": 8}, "the default voice 8 is not in its list"),
        ({"voices": [{"id": 7}]}, "missing required field"),
        ({"voices": None}, "Expected `array`"),
    ],
)
def test_broken_voices(source: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    synthetic.write_json(source / "voices.json", {**VOICES, **change})
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("source_id", ["scrappylabsai/warble", "someone/Warble-finetune"])
def test_warble_has_five_voices(source: Path, tmp_path: Path, source_id: str) -> None:
    convert(source, tmp_path / "out", source_id=source_id)
    voices = read(tmp_path / "out" / "voices.json")
    assert [voice["name"] for voice in voices["voices"]] == [
        "Silas",
        "Narrator",
        "Clara",
        "Pip",
        "Speaker 5",
    ]
    assert [voice["token"] for voice in voices["voices"]] == [
        f"<|speaker:{i}|>" for i in range(1, 6)
    ]
    assert voices["default"] in [voice["id"] for voice in voices["voices"]]


@pytest.mark.parametrize("source_id", ["Audio8/Audio8-TTS-Preview-0.6b", "warble/other", None])
def test_others_have_no_named_voices(source: Path, tmp_path: Path, source_id: str | None) -> None:
    convert(source, tmp_path / "out", source_id=source_id)
    assert read(tmp_path / "out" / "voices.json") == {"default": None, "voices": []}


def test_licences_are_copied(source: Path, tmp_path: Path) -> None:
    names = ["LICENSE", "LICENSE.voices", "NOTICE", "NOTICE.md", "licence.txt", "COPYING"]
    for name in names:
        (source / name).write_text(f"{name}\n")
    (source / "LICENSES").mkdir()
    (source / "other.txt").write_text("x")
    convert(source, tmp_path / "out")
    for name in names:
        assert (tmp_path / "out" / name).read_text() == f"{name}\n"
    assert not (tmp_path / "out" / "other.txt").exists()
    assert not (tmp_path / "out" / "LICENSES").exists()


def test_a_licence_that_is_a_link_elsewhere_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="is a link to"):
        convert(source, tmp_path / "out")


def front_matter(readme: Path) -> list[str]:
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return text.split("---\n")[1].splitlines()


def test_card(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\n---\nlicense: wrong\n", encoding="utf-8"
    )
    convert(source, tmp_path / "out", source_id="someone/model", revision="abc")
    assert front_matter(tmp_path / "out" / "README.md") == [
        "library_name: mlx",
        "pipeline_tag: text-to-speech",
        "license: apache-2.0",
        "base_model: someone/model",
        "base_model_relation: quantized",
        "tags:",
        "- mlx",
        "- arktts",
        "- tts",
        "- voice-cloning",
        "- apple-silicon",
    ]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "`someone/model` at revision `abc`" in text
    size = sum(value.size for value in synthetic.language_model(synthetic.config()).values())
    assert f"| model.safetensors | {size:,} | {2 * size / 1e6:.1f} |" in text


def test_card_of_a_local_source_claims_no_base_model_and_no_licence(
    source: Path, tmp_path: Path
) -> None:
    (source / "README.md").write_text('---\nlicense: "x\\n- evil"\n---\n', encoding="utf-8")
    convert(source, tmp_path / "out")
    front = front_matter(tmp_path / "out" / "README.md")
    assert not [line for line in front if line.startswith(("base_model", "license"))]


def test_readme_without_front_matter(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_bytes(b"# Title\n---\nlicense: mit\n---\n\xff")
    convert(source, tmp_path / "out")
    assert "license: mit" not in (tmp_path / "out" / "README.md").read_text()
