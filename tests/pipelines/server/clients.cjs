// Chats through a client of node: PACKAGE ADDRESS MODEL. Prints the texts as JSON; exits with 77
// where a package is not installed.
const [name, address, model] = process.argv.slice(2);
const question = [{ role: "user", content: "Where does a draft come from?" }];
const long = [{ role: "user", content: "x".repeat(900) }];

function load(...packages) {
  try {
    return packages.map((each) => require(require.resolve(each)));
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    process.exit(77);
  }
}

async function openai() {
  const [{ OpenAI }] = load("openai");
  const client = new OpenAI({ baseURL: address, apiKey: "none", maxRetries: 0 });
  const ask = (messages, more) =>
    client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 6, ...more });
  const first = (await ask(question)).choices[0].message;
  const turns = [...question, first, ...question];
  let streamed = "";
  for await (const chunk of await ask(turns, { stream: true })) {
    streamed += chunk.choices[0].delta.content ?? "";
  }
  const code = await ask(long).catch((error) => error.code);
  const second = (await ask(turns)).choices[0].message.content;
  return { first: first.content, second, streamed, code };
}

async function ai() {
  const [sdk, provider] = load("ai", name);
  const options = { name: "ragspec", baseURL: address, apiKey: "none" };
  const served = provider.createOpenAICompatible?.(options) ?? provider.createOpenAI(options);
  const settings = { model: served.chat?.(model) ?? served.chatModel(model), maxRetries: 0 };
  Object.assign(settings, { temperature: 0, maxOutputTokens: 6 });
  const first = await sdk.generateText({ ...settings, messages: question });
  const messages = [...question, ...first.response.messages, ...question];
  const streamed = await sdk.streamText({ ...settings, messages }).text;
  const code = await sdk
    .generateText({ ...settings, messages: long })
    .catch((error) => JSON.parse(error.responseBody).error.code);
  const second = (await sdk.generateText({ ...settings, messages })).text;
  return { first: first.text, second, streamed, code };
}

(name === "openai" ? openai() : ai()).then((result) => console.log(JSON.stringify(result)));
