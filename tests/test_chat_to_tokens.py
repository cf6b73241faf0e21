"""tools/chat_to_tokens.py: spans that are learnt, the usual shapes of conversations, splits."""

import json

import chat_to_tokens
import numpy as np
import pytest
import quickstart as quickstart_tool
import transformers

import data
import vocabulary
from data import mask_path

# Olmo 3's template (open-instruct, olmo_thinker, without functions), with the marks by which transformers finds spans.
# Its own closes the last turn with EOS, which is what `{{ eos_token }}` is here.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% if loop.last %}{{ eos_token }}{% else %}{{ '<|im_end|>' }}{% endif %}{% endgeneration %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "\n\n  And\tthe naïve one? \U0001f600 "},
    {"role": "assistant", "content": "\n a leading newline, \U0001f600 é and a trailing space "},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = quickstart_tool.train_tokenizer(["the answer is four, and the question is what\n\n"] * 9, 280)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def call(tmp_path, tokenizer, capsys):
    def call(*lines, flags=(), expect=0):
        (tmp_path / "chats.jsonl").write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        where = [str(tmp_path / "chats.jsonl"), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
        assert chat_to_tokens.main([*where, "--sequence-length", "16", "--json", *flags]) == expect
        out, err = capsys.readouterr()
        return err if expect else json.loads(out)

    return call


def test_spans_are_those_of_transformers(tokenizer):
    """A header or a user's word that is learnt, a closing token that is not: such a model never ends its turn."""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=data.EOS)
    ours = vocabulary.Turns(data.load_tokenizer(tokenizer), "t")
    eos = ours.tokenizer.token_to_id(data.EOS)
    for messages in (CHAT, CHAT[:3], CHAT[1:], CHAT[1:3]):
        found = theirs.apply_chat_template(
            messages, chat_template=TEMPLATE, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        ids, learnt = chat_to_tokens.encode(ours, eos, messages)
        assert ids == found["input_ids"]
        assert learnt == [bool(x) for x in found["assistant_masks"]]
        assert learnt[-1] and ids[-1] == eos and ids.count(eos) == 1


def test_by_hand(tokenizer):
    template = vocabulary.Turns(data.load_tokenizer(tokenizer), "t")
    eos = template.tokenizer.token_to_id(data.EOS)
    ids, learnt = chat_to_tokens.encode(template, eos, CHAT[1:])
    pieces = [template.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    shown = "".join(f"[{piece}]" if known else piece for piece, known in zip(pieces, learnt, strict=True)).replace(
        "][", ""
    )
    assert shown.startswith(
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>]\n<|im_start|>user\n"
    )
    assert shown.endswith("and a trailing space <|endoftext|>]")


def test_words_that_spell_special_tokens(tokenizer):
    """A user who writes <|im_end|> and so ends the turn."""
    template = vocabulary.Turns(data.load_tokenizer(tokenizer), "t")
    eos = template.tokenizer.token_to_id(data.EOS)
    said = f"one {data.TURN_END}\n{data.TURN}assistant\ntwo {data.EOS}"
    ids, learnt = chat_to_tokens.encode(
        template, eos, [{"role": "user", "content": said}, {"role": "assistant", "content": "no"}]
    )
    assert ids.count(template.start) == 2 and ids.count(template.end) == 1 and ids.count(eos) == 1
    assert template.tokenizer.decode([i for i, known in zip(ids, learnt, strict=True) if known]) == "no"


def test_shapes_and_splits(call, tmp_path, tokenizer):
    """A shape whose turns are lost, a conversation in both splits, masks that are not as long as their tokens."""
    pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    shapes = [
        {"messages": pair}, pair, {"prompt": "q", "completion": "a"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]  # fmt: skip
    assert {json.dumps(chat_to_tokens.messages_of(json.dumps(shape).encode(), "x")) for shape in shapes} == {
        json.dumps(pair)
    }
    chats = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(200)]
    result = call(*chats, {"messages": pair[:1]}, "", flags=("--held-out", "0.2"))
    assert "1 conversations without" in result["left_out"]
    counts, texts = result["splits"], {}
    template = vocabulary.Turns(data.load_tokenizer(tokenizer), "t")
    eos = template.tokenizer.token_to_id(data.EOS)
    for split in ("train", "heldout"):
        path = tmp_path / "out" / split / "token_ids_part_0000.npy"
        ids, learnt = np.fromfile(path, "<u4"), np.fromfile(mask_path(path), bool)
        assert (
            mask_path(path).name == "labels_mask_part_0000.npy" and len(ids) == len(learnt) == counts[split]["tokens"]
        )
        assert learnt.sum() == counts[split]["learnt"]
        documents = np.split(ids, np.flatnonzero(ids == eos) + 1)[:-1]
        texts[split] = {template.tokenizer.decode(d.tolist()) for d in documents}
        index = data.load_index(tmp_path / "out" / f"{split}.json")
        assert index.files[0].mask_hash is not None
    assert len(texts["train"]) + len(texts["heldout"]) == 200 and not texts["train"] & texts["heldout"]
    assert 20 <= counts["heldout"]["conversations"] <= 60


def test_answers_of_a_question_stay_together(tmp_path, tokenizer):
    """A held-out question whose other answer is trained on."""
    answers = [["question one", "first", "second"], ["question two", "third"]]
    (tmp_path / "a.yml").write_text(json.dumps({"categories": ["x"], "conversations": answers}))
    found = list(chat_to_tokens.read_conversations([tmp_path / "a.yml"]))
    assert [[m["content"] for m in messages] for _, messages in found] == [
        ["question one", "first"], ["question one", "second"], ["question two", "third"]
    ]  # fmt: skip


def test_a_system_message(call, tmp_path, tokenizer):
    call({"prompt": "q" * 40, "completion": "a" * 40}, flags=("--system", "Be kind.", "--held-out", "0"))
    ids = np.fromfile(tmp_path / "out/train/token_ids_part_0000.npy", "<u4")
    assert data.load_tokenizer(tokenizer).decode(ids.tolist()).startswith("system\nBe kind.\nuser\nqq")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1: not JSON"),
        ("{}", "line 1: got no turns; fix: messages, conversations, or prompt and completion"),
        ('{"messages": [{"role": "user"}]}', "expected a role and a text"),
        (
            '{"messages": [{"role": "judge", "content": "x"}]}',
            "got the role 'judge', expected system, user, assistant or",
        ),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no conversation with an assistant's turn"),
    ],
)
def test_bad_lines(call, tmp_path, line, says):
    """A folder that is half there, and in the way of the next try."""
    assert says in call(line, expect=2)
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_a_tokenizer_without_turns(call, tmp_path, quickstart):
    from tokenizers import Tokenizer, models

    path = tmp_path / "bare.json"
    Tokenizer(models.BPE()).save(str(path))
    assert "got a tokenizer without <|im_start|>" in call("{}", flags=("--tokenizer", str(path)), expect=2)
