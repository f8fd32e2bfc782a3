// OpenAI's own client for Node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { apiKey, baseURL, busyURL, collected, messages, model, rejects, run } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const busy = new OpenAI({ baseURL: busyURL, apiKey, maxRetries: 0 });
const greedy = { model, messages, temperature: 0, max_completion_tokens: 12 };
const text = { model, prompt: ["Once upon a time", "The bear"], temperature: 0, max_tokens: 8 };
const long = { ...greedy, n: 4, max_completion_tokens: 480, logprobs: true, top_logprobs: 20, ignore_eos: true };
const create = (body, options) => client.chat.completions.create(body, options);
const contentOf = (chunks) => chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");

await run("openai", {
  async models() {
    assert.deepEqual((await collected(client.models.list())).map((found) => found.id), [model]);
    assert.equal((await client.models.retrieve(model)).object, "model");
    await rejects(client.models.retrieve("other"), OpenAI.NotFoundError, { status: 404, code: "model_not_found" });
  },

  async chat() {
    const { data, response } = await create(greedy).withResponse();
    assert.equal(response.status, 200);
    assert.equal(data.choices[0].finish_reason, "length");
    assert.equal(data.usage.completion_tokens, 12);
  },

  async parameters() {
    const options = { temperature: 1, top_p: 0.9, seed: 5, n: 2, logprobs: true, top_logprobs: 3, stop: ["zzz"] };
    const body = { ...greedy, ...options, presence_penalty: 0.5, frequency_penalty: 0.5, logit_bias: { 5: -100 }, top_k: 20 };
    const [first, second] = [await create(body), await create(body)];
    assert.deepEqual(first.choices, second.choices);
    const { content } = first.choices[1].logprobs;
    const spelled = Buffer.concat(content.map((token) => Buffer.from(token.bytes))).toString();
    assert.equal(spelled, first.choices[1].message.content);
    assert.equal(content[0].top_logprobs.length, 3);
  },

  async stream() {
    const chunks = await collected(await create({ ...greedy, stream: true, stream_options: { include_usage: true } }));
    assert.equal(contentOf(chunks), (await create(greedy)).choices[0].message.content);
    assert.equal(chunks.at(-1).usage.completion_tokens, 12);
    assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
  },

  async streamHelper() {
    const stream = client.chat.completions.stream({ ...greedy, max_completion_tokens: 300, stop: ".", logprobs: true });
    const deltas = [];
    stream.on("content", (delta) => deltas.push(delta));
    const final = await stream.finalChatCompletion();
    assert.equal(deltas.join(""), final.choices[0].message.content);
    assert.equal(final.choices[0].finish_reason, "stop");
  },

  async completions() {
    const reply = await client.completions.create({ ...text, logprobs: 1 });
    const texts = ["", ""];
    for (const chunk of await collected(await client.completions.create({ ...text, stream: true }))) {
      for (const choice of chunk.choices) texts[choice.index] += choice.text;
    }
    assert.deepEqual(texts, reply.choices.map((choice) => choice.text));
    const echoed = await client.completions.create({ ...text, echo: true });
    assert.deepEqual(echoed.choices.map((choice) => choice.text), texts.map((answer, i) => text.prompt[i] + answer));
  },

  async errors() {
    const bad = { status: 400, type: "invalid_request_error" };
    await rejects(create({ ...greedy, top_p: 2 }), OpenAI.BadRequestError, { ...bad, param: "top_p" });
    await rejects(create({ ...greedy, top_p: 2, stream: true }), OpenAI.BadRequestError, { ...bad, param: "top_p" });
    const exceeded = { ...bad, code: "context_length_exceeded" };
    await rejects(create({ ...greedy, max_completion_tokens: 9999 }), OpenAI.BadRequestError, exceeded);
    await rejects(create({ ...greedy, model: "gpt-4" }), OpenAI.NotFoundError, { status: 404, param: "model" });
    const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await rejects(stranger.models.list(), OpenAI.AuthenticationError, { status: 401, code: "invalid_api_key" });
    const huge = { ...greedy, messages: [{ role: "user", content: "x".repeat(5 << 20) }] };
    await rejects(create(huge), OpenAI.APIError, { status: 413, code: "request_too_large" });
  },

  async aFullServerRefusesAndRetriesSucceed() {
    const stream = await busy.chat.completions.create({ ...long, stream: true });
    await stream[Symbol.asyncIterator]().next();
    await rejects(busy.chat.completions.create(greedy), OpenAI.RateLimitError, { status: 429, code: "rate_limit_exceeded" });
    const patient = await busy.chat.completions.create(greedy, { maxRetries: 5 });
    assert.equal(patient.usage.completion_tokens, 12);
    stream.controller.abort();
  },

  async abort() {
    const controller = new AbortController();
    const asked = busy.chat.completions.create(long, { signal: controller.signal, maxRetries: 5 });
    setTimeout(() => controller.abort(), 50);
    await rejects(asked, OpenAI.APIUserAbortError, {});
    const stream = await busy.chat.completions.create({ ...long, stream: true }, { maxRetries: 3 });
    for await (const chunk of stream) if (contentOf([chunk])) break;
    const reply = await busy.chat.completions.create({ ...greedy, n: 4 }, { maxRetries: 3 });
    assert.equal(reply.choices.length, 4);
  },
});
