// Asks the search of the built site: `node site_search.js SITE WORDS...` prints the pages for each of the words, the best
// first. It runs the worker of the site itself, so the ranking is that of the search field.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...questions] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const name = fs.readdirSync(workers).find(file => /^search.*\.js$/.test(file));

let ask, answered;
const worker = vm.createContext({
  console,
  addEventListener: (_, listener) => { ask = listener; },
  postMessage: message => answered(message.data),
});
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(workers, name), "utf8"), worker);
const send = (type, data) => new Promise(resolve => { answered = resolve; ask({ data: { type, data } }); });

(async () => {
  await send(0, { ...JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"))), options: {} });
  const pages = {};
  for (const question of questions) {
    pages[question] = (await send(2, question)).items.map(sections => sections[0].location);
  }
  console.log(JSON.stringify(pages));
})();
