"""The bugs, at the seams of the engine. The default tests must catch each of them."""

from tests.mutants.plant import Mutant

MUTANTS = [
    # ---- The definition of models: configs, tensors, layers, rotary embedding ----
    Mutant("what was rolled back stays", "KVSequence.roll_back", "self.pending -= n", "pass"),
    Mutant("windows forgotten in the size of a cache", "pool_nbytes", "layer.window", "None"),
    Mutant(
        "a scale without a key is lost",
        "TensorLayout.put",
        "(v.reshape(len(v), -1) - plus) * self.factors",
        "v.reshape(len(v), -1) - plus",
    ),
    Mutant("the narrowest side counts", "Conversion.type_of", "max(shape) < least", "min(shape) < least"),
    Mutant("the last layer for all tokens", "decoder_layers", 'want if i == len(layers) - 1 else "every"', '"every"'),
    Mutant(
        "LongRoPE's divisors exchanged",
        "longrope",
        "r.long if r.is_long else r.short",
        "r.short if r.is_long else r.long",
    ),
    Mutant("query and key norm forgotten", "layer.heads", "None if isinstance(w.norms, RowNorms) else w.norms", "None"),
    Mutant(
        "norm weights without their 1",
        "gemma3",
        'Row("model.layers.*.input_layernorm.weight", "D", plus=1.0)',
        'Row("model.layers.*.input_layernorm.weight", "D")',
    ),
    Mutant("embedding not scaled", "ScaledEmbeddings.embed", "self.config.hidden_size**0.5", "1.0"),
    Mutant(
        "heads are not permuted for GGUF",
        "TensorLayout.in_file_order",
        "np.argsort(self._order(head_dim))",
        "self._order(head_dim)",
    ),
    Mutant("the lookup table is expanded", "Parameters.table", "not self._backend.embeds_stored(weight)", "True"),
    Mutant("attention scale forgotten", "Attention.read", "Scores(config.head_dim**-0.5)", "Scores(1.0)"),
    Mutant(
        "an allowed setting is ignored although it is implemented",
        "allow",
        'f"{refused}.".startswith(_dotted(paths[n]))',
        "True",
    ),
    # ---- Backends: operations and their references ----
    Mutant(
        "BLAS limit lifted too early",
        "one_blas_thread",
        "if _held == 0:\n    _limit.restore_original_limits()",
        "if True:\n    _limit.restore_original_limits()",
    ),
    Mutant(
        "table of rotations does not grow",
        "CompiledBackend.rope_table",
        "found is None or len(found[0]) < length",
        "found is None",
    ),
    Mutant("helpers are never woken", "CompiledBackend.run_entry", "self.pool.shared.wake()", "pass"),
    Mutant("the norm of what is added forgotten by the program", "Lowering.project_norm_add", "norm", "None"),
    Mutant(
        "a gate in another format read as that of what it gates",
        "Block.__init__",
        "self.n_inputs % layout.LANES == 0 and not (gated and matrices[0].format != matrices[1].format)",
        "self.n_inputs % layout.LANES == 0",
    ),
    Mutant("no soft cap in programs", "Lowering.attention", "scores.softcap", "0.0"),
    Mutant("a sink in the maximum alone", "softmax", "divisor + np.exp(sinks - most)", "divisor"),
    Mutant(
        "a sequence attends to the first one's keys",
        "SimdBackend.attention",
        "span.slots(first, span.length, kv.page)",
        "kv.spans[0].slots(first, span.length, kv.page)",
    ),
    # ---- Compiled kernels: attention, states, the thread pool, machine code ----
    Mutant("the last logits are left out of the softmax", "sum_exp.sum_exp", "whole < n", "False"),
    Mutant(
        "window one too wide", "first_visible", "max(0, position + 1 - job[WINDOW])", "max(0, position - job[WINDOW])"
    ),
    Mutant("first block of keys alone", "_join_blocks", "range(1, n_blocks)", "range(1, 1)"),
    Mutant("a block that no query of a tile sees counts", "attend_decode", "not seen", "False"),
    Mutant("scores are not capped", "attend_block", "inner_scale != 0", "False"),
    Mutant(
        "two threads share scratch memory",
        "scratch_of",
        "control[SCRATCH] + thread * SCRATCH_BYTES",
        "control[SCRATCH]",
    ),
    Mutant(
        "machine code of another processor is run", "code_file", 'f"{processor}-{target}-{part}.code"', 'f"{part}.code"'
    ),
    Mutant(
        "code for a processor that is too old is run",
        "_widens",
        "return not any(name in code for name in _CALLED)",
        "return True",
    ),
    Mutant(
        "damaged machine code is loaded",
        "_loaded",
        'hashlib.sha256(file.read_bytes()).hexdigest() != listed["sha256"]',
        "False",
    ),
    Mutant("code that this processor cannot run is loaded", "_fits", "target.needs <= instruction_sets()", "True"),
    Mutant("a bundled application starts itself", "build", 'getattr(sys, "frozen", False)', "False"),
    Mutant(
        "the tail of a layer norm not centred",
        "layer_norm",
        "put(out, to + i, get(x, at + i) - mean)",
        "put(out, to + i, get(x, at + i))",
    ),
    # ---- Compiled kernels: products and formats ----
    Mutant("bias of the first rows for all", "add_bias", "floats(job[m + BIAS] + 4 * first)", "floats(job[m + BIAS])"),
    Mutant("totals of another vector", "fold_all", "i", "n - 1 - i"),
    Mutant(
        "a piece of the columns forgotten",
        "multiply_stored",
        "min(depth, n_columns - column)",
        "min(depth, n_columns - column) // 512 * 256",
    ),
    Mutant("high bits of the first half for both", "quants", "at + HIGH + 32 * half", "at + HIGH"),
    Mutant("a row behind the last one read", "_for_panels.choose.multiply", "min(rows[3] + i, last[3])", "rows[3] + i"),
    Mutant(
        "a minimum of 16 columns meets the total of 32",
        "_Step.added",
        "[HALF_TOTALS, HALF_TOTALS + 4]",
        "[TOTAL, TOTAL]",
    ),
    Mutant(
        "the totals of tokens without their scales", "pack", "np.float32(low + high) * scale", "np.float32(low + high)"
    ),
    Mutant("a panel of the first columns for all", "_add_panel", "row_bytes(job, m, column)", "0"),
    Mutant("what is not finite becomes zero", "_quantize_block.generate", 'ir.Constant(_F32, float("nan"))', "nothing"),
    # ---- Mixtures of experts ----
    Mutant(
        "of equal logits the last expert",
        "choose",
        "not value > get(logits, at + ids[to + n - 1])",
        "not value >= get(logits, at + ids[to + n - 1])",
    ),
    Mutant("gate and up of gpt-oss exchanged", "_interleaved", "int(part == 'up')", "int(part == 'gate')"),
    # ---- The scheduler: slots, order, budgets, memory, faults ----
    Mutant(
        "parallel samples take no slots until they are made",
        "Scheduler._admit",
        "sum(1 + len(one.parallel) for one in (first, *self.running))",
        "1 + len(first.parallel) + len(self.running)",
    ),
    Mutant("the oldest is preempted", "Scheduler._schedule", "self.running[-1]", "self.running[0]"),
    Mutant(
        "prompts fill the pass while others are answered",
        "Scheduler._chunks",
        "self._shared_budget if is_shared else self._budget",
        "self._budget",
    ),
    Mutant(
        "a pass beyond the last token",
        "Scheduler._is_ready",
        "len(sequence.output.token_ids) + n_pending < most",
        "len(sequence.output.token_ids) < most",
    ),
    Mutant("a cancelled answer keeps its pages", "Scheduler._remove", "sequence.kv.close()", "pass"),
    Mutant("a fault ends all requests", "Scheduler._run", "not self._runner.is_idle", "True"),
    Mutant("everybody pays the whole pass", "Scheduler._record", "done.seconds * chunk.n / n_rows", "done.seconds"),
    Mutant("parallel samples draw the same numbers", "Sequence.of", "sampler.fork(choice)", "sampler.fork(0)"),
    Mutant(
        "an answer that is computed again forgets its tokens",
        "Sequence.rewind",
        "list(self.ids)",
        "list(self.request.prompt_ids)",
    ),
    Mutant("a refused answer waits for all others", "Scheduler._remove", "self._refused = None", "pass"),
    # ---- Pages and the prefix cache ----
    Mutant(
        "a page is shared without a reference",
        "KVPool.retain",
        "self._references[group][pages // self.page] += 1",
        "pass",
    ),
    Mutant(
        "one token of a page is not copied",
        "KVSequence._replace_last",
        "(self.length + self.pending) % self.pool.page",
        "(self.length + self.pending) % self.pool.page - 1",
    ),
    Mutant("a match is one token too long", "_agreeing", "int(differing[0])", "int(differing[0]) + 1"),
    Mutant("both sides of a split page have one reference", "RadixTree._split", "at % self._page", "False"),
    # ---- Speculation ----
    Mutant("a wrong proposal is accepted", "Scheduler._accept_chunk", "token == chunk.proposed[n]", "True"),
    Mutant("a draft model keeps wrong tokens", "DraftModel._settle", "held.pending[n] == following[n]", "True"),
    Mutant("a draft model keeps the pages of an answer", "DraftModel.release", "held.kv.close()", "pass"),
    Mutant(
        "an answer that ends keeps its drafters' pages",
        "Scheduler._remove",
        "self.speculation.release(sequence)",
        "pass",
    ),
    Mutant(
        "hidden states of wrong tokens are kept",
        "ModelRunner._keep_hidden",
        "self._model.backend.host(chunk.hidden)[: chunk.n]",
        "self._model.backend.host(chunk.hidden)",
    ),
    Mutant("the layer begins with a gap", "NextTokens._next", "start + len(rows) != first", "False"),
    Mutant("a draft model draws other numbers", "Sampler.guess", "len(self._recent) + len(ids)", "len(self._recent)"),
    Mutant(
        "a draw after a proposal reads the row before it",
        "ModelRunner.choose_next",
        "chunk.row + i",
        "chunk.row + i - 1",
    ),
    Mutant(
        "the tokens before a page do not count",
        "disk.chains",
        "last + numbers[first : first + page].tobytes()",
        "numbers[first : first + page].tobytes()",
    ),
    Mutant(
        "a page that was overwritten while it was read is written",
        "DiskPrefixes._write",
        "if not is_current():\n    content = None",
        "pass",
    ),
    # ---- States ----
    Mutant("a pass writes over the state that it reads", "SequenceState.begin", "self._pool.take()", "source.slot"),
    Mutant(
        "a prefix is reused with the state of another length",
        "RadixTree.usable",
        "snapshot.length <= n",
        "snapshot.length <= n + 1",
    ),
    Mutant(
        "states that a sequence holds are dropped from the cache",
        "PrefixCache._reclaim_states",
        "states.references(node.states[length]) == 1",
        "True",
    ),
    Mutant(
        "the delta rule forgets the state before the pass",
        "SimdBackend.delta_rule",
        "state.store[source]",
        "state.store[0]",
    ),
    # ---- Several ranks share a layer ----
    Mutant(
        "parts of a product are not added",
        "whole_product",
        "be.all_sum(be.linear(x, projection))",
        "be.linear(x, projection)",
    ),
    Mutant(
        "a norm of whole rows reads one rank's columns",
        "row_normed",
        "be.all_columns(be.linear(x, linear), own.of)",
        "be.linear(x, linear)",
    ),
    Mutant("a compiled program leaves exchanges out", "_Steps.run", "last in self._exchanges", "False"),
    # ---- Several machines ----
    Mutant("ranks are added in the reverse order", "Group.sum", "gathered[rank]", "gathered[self.size - rank]"),
    Mutant("the other ranks are not told who is gone", "Heartbeat._stop", "self._say(code=code)", "pass"),
    # ---- Checkpoints and damaged files ----
    Mutant("sign bits without the eighth", "with_parity", "bits | folded << np.uint8(7)", "bits"),
    Mutant(
        "columns of GPTQ in equal groups",
        "_gptq_layer",
        'part(files, f"{prefix}.g_idx", "I32").astype(np.int64)',
        "groups",
    ),
    Mutant("parts of a split file in any order", "_check_parts", "found != expected", "False"),
    Mutant(
        "Q4_0 halves exchanged",
        "pack_halves",
        "quants[:, :16] | quants[:, 16:] << np.uint8(4)",
        "quants[:, 16:] | quants[:, :16] << np.uint8(4)",
    ),
    # ---- Weights and their conversion ----
    Mutant(
        "chat finds out after loading that no answer fits the context",
        "chat.chat",
        "check(opened.prompts, options, list(messages) or shortest(prompt.system), variables, tools)",
        "None",
    ),
    Mutant("cutting groups joins the bytes of all rows", "Parameters._own", "type(stored) is Weight", "True"),
    # ---- Paths and drafts ----
    Mutant("drafts without a lock", "_created", "_locked(lock)", "lock"),
    # ---- Conversations ----
    Mutant("arguments stay JSON text", "_normal_call", "isinstance(given, str)", "False"),
    Mutant("a reminder moves to the head", "template._Probe._mark", "is_moved or is_shown", "is_shown"),
    Mutant("values of calls forge control tokens", "SpokenCalls.changed", "_map(calls, change)", "calls"),
    # ---- Tokenizers, stop strings, sampling ----
    Mutant("tokens of the prompt are penalised as generated ones", "adjust", "recent[draw.n_prompt :]", "recent"),
    Mutant("penalty divides negative logits too", "backends.sampling.penalize", "hit * penalty", "hit / penalty"),
    Mutant("the last pass is settled first", "ModelRunner.step", "self._flight[0]", "self._flight[-1]"),
    Mutant(
        "a slow caller is charged to the device",
        "PassTimer.interval",
        "max(inside, min(whole, self._waited_for))",
        "whole",
    ),
    Mutant("eos ignored", "Output.append", "token in self._end_ids", "False"),
    Mutant(
        "a run that has ended keeps its scheduler",
        "Stream.__next__",
        "if output.finish_reason is not None:\n    self.close()",
        "pass",
    ),
    Mutant("BOS written twice", "_with_bos", "bos_id is None or ids[:1] == [bos_id]", "bos_id is None"),
    # ---- Research ----
    Mutant("logits of discarded tokens stay", "Session.rewind", "self._row = None", "pass"),
    Mutant(
        "a pass for hidden states goes on with composed results",
        "_twice",
        "return fused(*args, **kwargs)",
        "return composed(self, *args, **kwargs)",
    ),
    Mutant("a processor that fails ends the pass", "_edited", "chunk.error = error", "raise error"),
    # ---- Conversations ----
    Mutant("tools make markers", "TemplateInput.map_texts", "map_values(self.tools, change)", "self.tools"),
    # ---- The server ----
    Mutant(
        "a stream without its end",
        "Choices.end",
        'return b"".join(map(event, chunks)) + DONE',
        'return b"".join(map(event, chunks))',
    ),
    Mutant(
        "the end-of-text token has a log-probability", "Choices._tokens", "until.n_tokens - is_hidden", "until.n_tokens"
    ),
    Mutant("what a client leaves behind is computed", "Worker.running", 'self._send("cancel", call)', "pass"),
    Mutant("steps of a long prompt hold back the heartbeat", "_events", "not data and now() >= due", "not is_new"),
    Mutant(
        "reasoning that comes back is lost", "_read_answer", 'chat.think(text_in(block, "thinking", where))', "pass"
    ),
    Mutant(
        "what follows a line of one client is lost", "without_noise", "text[match.end() :] if match else text", '""'
    ),
    Mutant("a call goes back without its namespace", "ResponsesReply._item", "namespace is None", "True"),
    Mutant("cached tokens count twice", "MessagesReply._usage", "self.n_prompt - self.n_cached", "self.n_prompt"),
    Mutant("a body without a bound", "read_body", "len(body) > limit", "False"),
    Mutant("a dead engine is healthy", "Worker._die", "self.fault = fault", "pass"),
    Mutant(
        "a slow reader is waited for", "Connection.check", "lingers or now - self._moved_at > patience.read", "lingers"
    ),
    Mutant("a continued answer begins again", "generation.begun", "[*ids, *tokenizer.encode(reading.begun)]", "ids"),
    # ---- The life of an engine ----
    Mutant(
        "a sum that overflows is a fault",
        "Backend.bad_rows",
        "{r: row for r, row in rows.items() if not np.isfinite(row).all()}",
        "rows",
    ),
    Mutant(
        "the error is that of a longer prompt",
        "ModelRunner._settle",
        "chunk.sequence.sampler.ids[: first.position]",
        "chunk.sequence.sampler.ids",
    ),
    Mutant(
        "each backend has a new stream of MLX", "_take", "stream.device == device and process == os.getpid()", "False"
    ),
    # ---- Metal kernels and their backend ----
    Mutant(
        "emulated metal chosen by itself",
        "auto",
        'not (name == "metal" and _emulated()) and unavailable(name) is None',
        "unavailable(name) is None",
    ),
    Mutant(
        "a bias forgotten on metal",
        "_split",
        "isinstance(linear.weight, SplitMatrix) and linear.bias is None",
        "isinstance(linear.weight, SplitMatrix)",
    ),
    Mutant("tuning by noise", "fastest", "medians[default] * (1 - MARGIN)", "medians[default]"),
    Mutant(
        "a kernel of one stored type taken for another's",
        "SplitMatrix.instance",
        "self.shape, self.matrix.layout",
        "self.shape",
    ),
    Mutant("the type of queries for values", "norm_qkv.norm_qkv", "('V_W', v.layout.code)", "('V_W', q.layout.code)"),
    Mutant(
        "a choice is looked at before it is asked for",
        "MlxBackend.argmax",
        "return mx.argmax(logits.squeeze(0))",
        "return mx.array(mx.argmax(logits.squeeze(0)).item(), mx.uint32)",
    ),
    Mutant("a product of rounded activations is float32", "GroupMatrix.multiply", "y.astype(x.dtype)", "y"),
    Mutant(
        "ranks do not compare the type of activations",
        "CheckedCheckpoint.__post_init__",
        'settings |= {"activations": self.activations, "kv_type": self.kv_type}',
        "pass",
    ),
    # ---- The emulator ----
    Mutant(
        "unwritten threadgroup memory has the same values in every order",
        "options_of",
        "POISONS[(seed + 2 * races) % len(POISONS)]",
        "POISONS[0]",
    ),
    Mutant("warnings bury an error", "errors_only", "found['kind'].endswith('error')", "True"),
    Mutant("compiled functions call kernels with nothing", "_uncompiled", "mx.disable_compile()", "pass"),
    Mutant(
        "a write beside an output is not traced",
        "located",
        "late = fault.seen == 'afterwards'",
        "late = False",
    ),
    Mutant(
        "an array is bound to a tensor with its axes in the array's order",
        "WholeKernel._shape",
        "reversed([int(n) for n in shape])",
        "[int(n) for n in shape]",
    ),
    # ---- MLX's folders ----
    Mutant(
        "settings of single matrices forgotten",
        "Quantization.of",
        "return self.by_name.get(name, self.default)",
        "return self.default",
    ),
    Mutant(
        "a text model inside of another without its prefix",
        "forms_of",
        '"text_config" in config or model_type in INNER.values()',
        "False",
    ),
    # ---- Receipts and the journal ----
    Mutant(
        "a line is appended to a part of another", "Journal._write", 'b"\\n" + line if self._is_torn else line', "line"
    ),
    # ---- Connections ----
    Mutant("half a head is waited for without an end", "Connection.check", "patience.head", "float('inf')"),
    Mutant(
        "a refused connection is closed before its reply is read", "refuse", '"connection" in response.headers', "False"
    ),
    # ---- Whole answers ----
    Mutant("functions are kept once per address space", "without_twins", "key in seen", "False"),
    # ---- Gemma 4 ----
    Mutant(
        "the last layer with keys and values is skipped in a chunk",
        "decoder_layers",
        "1 + max((i for i, w in enumerate(layers) if writes(w)), default=-1)",
        "max((i for i, w in enumerate(layers) if writes(w)), default=-1)",
    ),
    # ---- Plans ----
    Mutant(
        "a shared array counts twice",
        "held",
        "sum({id(array): array.nbytes for part in parts for array in part.arrays}.values())",
        "sum([array.nbytes for part in parts for array in part.arrays])",
    ),
    # ---- Constraints ----
    Mutant(
        "a bias wins over the mask",
        "sampling.adjust",
        "logits if draw.mask is None else masked(logits, draw.mask)",
        "logits if draw.mask is None or sampling.logit_bias else masked(logits, draw.mask)",
    ),
    Mutant(
        "a constrained greedy choice takes the largest of all",
        "Backend.choose",
        "draw.mask is None and draw.sampling.is_argmax",
        "draw.sampling.is_argmax",
    ),
    Mutant("a dead end counts as the end of the text", "Matcher._words", "self._compiled.is_error()", "False"),
    Mutant("a checked choice is taken unchecked", "Sampler.redraw", "not self.is_checked", "self.is_checked"),
    Mutant("answers share one matcher", "Sampler.fork", "self._matcher.copy()", "self._matcher"),
    Mutant(
        "a pass ahead is chosen with the mask of the token before",
        "ModelRunner._waits_for_mask",
        "self.n_pending(chunk.sequence) > 0",
        "False",
    ),
    # ---- Benchmarks beside other processes ----
    Mutant("figures beside a busy process are usable", "origin.fields", "share <= MOST", "True"),
    # ---- Tool calls ----
    Mutant(
        "text that may be a delimiter is given out",
        "Delimiter.find",
        "maybe.start() <= found.start()",
        "maybe.start() < found.start()",
    ),
    Mutant("a delimiter counts without its token", "marked", 'f"(?:{MARK}{match[0]})"', "match[0]"),
    Mutant("a call that was cut off is complete", "CallReader._tags", "not cursor.is_cut", "True"),
    Mutant("the mark is behind the token", "StreamDecoder.add", "self._n - len(literal)", "self._n"),
    Mutant(
        "several calls where one is allowed",
        "_Grammar.of",
        "choice.is_parallel and self._form.is_parallel",
        "self._form.is_parallel",
    ),
    # ---- Rows of prompts: log-probabilities, embeddings ----
    Mutant(
        "a scored prompt begins in the prefix cache",
        "Scheduler._attach_prefix",
        "min(len(ids) - 1, request.reader.start)",
        "len(ids) - 1",
    ),
    Mutant(
        "a pass has all rows of a prompt", "Sequence.chunk", "min(n, max(0, reader.start - first) + most_rows)", "n"
    ),
    Mutant("an end token is missing after a scored echo", "CompletionReply._tokens", "self._is_scored", "False"),
    Mutant("no EOS after a text to embed", "RequestBuilder.embedding", "[*self.ids(text), *end]", "self.ids(text)"),
]
