// The package `ai` with its provider for servers such as this one.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import { apiKey, baseURL, busyURL, collected, model, rejects, run } from "./checks.mjs";

const provider = (baseURL, apiKey) => createOpenAICompatible({ name: "local", baseURL, apiKey, includeUsage: true });
const local = provider(baseURL, apiKey);
const busy = provider(busyURL, apiKey);
const asked = { model: local(model), prompt: "Tell me a story.", temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const ours = { providerOptions: { local: { ignore_eos: true } } };
const quiet = { onError() {} };

await run("ai", {
  async generate() {
    const found = await generateText(asked);
    assert.ok(found.text.length > 0);
    assert.equal(found.finishReason, "length");
    assert.equal(found.usage.outputTokens, 12);
    assert.equal(found.usage.inputTokens + 12, found.usage.totalTokens);
  },

  async stream() {
    const result = streamText({ ...asked, ...quiet });
    const text = (await collected(result.textStream)).join("");
    assert.equal(text, (await generateText(asked)).text);
    assert.equal(await result.finishReason, "length");
    assert.equal((await result.usage).outputTokens, 12);
  },

  async conversation() {
    const messages = [
      { role: "user", content: [{ type: "text", text: "Hello." }] },
      { role: "assistant", content: "Hello." },
      { role: "user", content: "Tell me a story." },
    ];
    const { prompt, ...rest } = asked;
    assert.ok((await generateText({ ...rest, messages, instructions: "Be kind." })).text.length > 0);
  },

  async parameters() {
    const options = { temperature: 1, topP: 0.9, seed: 5, presencePenalty: 0.1, frequencyPenalty: 0.1, stopSequences: ["zzz"] };
    const extra = { providerOptions: { local: { top_k: 20, min_p: 0.01 } } };
    const [first, second] = [await generateText({ ...asked, ...options, ...extra }), await generateText({ ...asked, ...options, ...extra })];
    assert.equal(first.text, second.text);
    const word = (await generateText(asked)).text.split(" ")[2];
    assert.equal((await generateText({ ...asked, stopSequences: [word] })).finishReason, "stop");
  },

  async completions() {
    const completion = { ...asked, model: local.completionModel(model), prompt: "Once upon a time" };
    const text = (await generateText(completion)).text;
    assert.equal((await collected(streamText({ ...completion, ...quiet }).textStream)).join(""), text);
  },

  async errors() {
    const fields = (statusCode, isRetryable = false) => ({ statusCode, isRetryable });
    await rejects(generateText({ ...asked, topP: 2 }), APICallError, fields(400));
    await rejects(generateText({ ...asked, maxOutputTokens: 9999 }), APICallError, fields(400));
    await rejects(generateText({ ...asked, model: local("gpt-4") }), APICallError, fields(404));
    await rejects(generateText({ ...asked, model: provider(baseURL, "wrong")(model) }), APICallError, fields(401));
    const message = await generateText({ ...asked, topP: 2 }).catch((error) => error.message);
    assert.match(message, /^top_p: expected/);
  },

  async errorsOfStreams() {
    const found = [];
    const result = streamText({ ...asked, topP: 2, onError: ({ error }) => found.push(error) });
    await result.consumeStream();
    assert.equal(found[0].statusCode, 400);
  },

  async abort() {
    const controller = new AbortController();
    const long = { ...asked, ...ours, model: busy(model), maxOutputTokens: 480, abortSignal: controller.signal };
    const works = [1, 2, 3, 4].map(() => generateText(long));
    setTimeout(() => controller.abort(), 100);
    await Promise.allSettled(works);
    await rejects(generateText(long), Error, { name: "AbortError" });
    const found = await Promise.all([1, 2, 3, 4].map(() => generateText({ ...asked, model: busy(model), maxRetries: 2 })));
    assert.equal(new Set(found.map((one) => one.text)).size, 1);
  },

  async retries() {
    const long = { ...asked, ...ours, ...quiet, model: busy(model), maxOutputTokens: 480 };
    const streams = [1, 2, 3, 4].map(() => streamText(long).consumeStream());
    const works = [1, 2, 3].map(() => generateText({ ...asked, model: busy(model), maxRetries: 4 }));
    assert.ok((await Promise.all(works)).every((one) => one.usage.outputTokens === 12));
    await Promise.all(streams);
  },
});
