// Search for the text of an error as it was printed. lunr would take its `:`, `-`, `*` and `"` for operators, and the
// words of a whole paragraph are in every page.
const WORDS = 16;
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...others) {
  const query = message && message.data;
  if (typeof query === "string") {
    const words = query.replace(/[-+:*^~"]/g, " ").trim().split(/\s+/);
    message = { ...message, data: words.slice(0, WORDS).join(" ") };
  }
  return post.call(this, message, ...others);
};
