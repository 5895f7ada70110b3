// Finds the topics of texts (latent Dirichlet allocation), in several processes of several threads:
//
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/lda --world 2 --rank $rank --texts chapters & done; wait
//
// The file has a document in each line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "worker/examples/files.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"
#include "worker/examples/store_program.h"
#include "worker/examples/readers/texts.h"
#include "worker/examples/topics.h"

namespace phub::examples {
namespace {

struct Options {
  StoreProgram program;
  TopicOptions topics;
  TextOptions words;
  std::string texts = "texts", out;
};

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = 200;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "lda";
  CLI::App app("Finds the topics of texts, one process per rank.");
  add_store_options(app, options.program);
  app.add_option("--texts", options.texts, "A file with a document in each line")
      ->capture_default_str();
  app.add_option("--least-documents", options.words.least_documents, "That a word must be in")
      ->capture_default_str();
  app.add_option("--most-documents", options.words.most_documents,
                 "Part of them that a word may be in")
      ->check(between(0, 1))
      ->capture_default_str();
  app.add_option("--topics", options.topics.topics)
      ->check(CLI::Range(2u, 4096u))
      ->capture_default_str();
  app.add_option("--alpha", options.topics.alpha)->check(between(1e-6, 1e3))->capture_default_str();
  app.add_option("--beta", options.topics.beta)->check(between(1e-6, 1e3))->capture_default_str();
  app.add_option("--seed", options.topics.seed)->check(not_negative())->capture_default_str();
  app.add_option("--out", options.out, "Write how often each word has each topic to this file");
  parse_or_exit(app, argc, argv);
  return options;
}

void report(const Texts& texts, std::span<const int32_t> counts, const Options& options) {
  const uint32_t topics = options.topics.topics;
  const auto count = [&](size_t word, uint32_t topic) { return counts[word * topics + topic]; };
  std::vector<size_t> order(texts.words.size());
  fmt::print("{} documents, {} words\n", texts.documents.size(), texts.words.size());
  for (uint32_t k = 0; k < topics; ++k) {
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, {}, [&](size_t word) { return -count(word, k); });
    fmt::print("topic {}:", k);
    for (size_t i = 0; i < std::min<size_t>(8, order.size()); ++i) {
      fmt::print(" {}", texts.words[order[i]]);
    }
    fmt::print("\n");
  }
  std::string lines;
  for (size_t word = 0; word < texts.words.size(); ++word) {
    lines += texts.words[word];
    for (uint32_t k = 0; k < topics; ++k) lines += fmt::format(" {}", count(word, k));
    lines += '\n';
  }
  write_file(options.out, lines);
}

void run(Options options) {
  StoreProgram& program = options.program;
  check_can_write(options.out);
  const Texts texts = read_texts(options.texts, options.words);
  program.store.tables = Topics::tables(texts, options.topics);
  iterstore::Store store(program.store);
  agree(program, "lda",
        {fmt::format("seed {}", options.topics.seed), fmt::format("alpha {}", options.topics.alpha),
         fmt::format("beta {}", options.topics.beta),
         fmt::format("documents {}", texts.documents.size())});
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    Topics topics(texts, options.topics, part, parts_of(program));
    topics.begin(mine);
    run_iterations(mine, program, [&](uint32_t) { topics.iterate(mine); });
  });
  const std::vector<std::byte> table = store.table(0);
  if (program.store.worker.rank != 0) return;
  std::vector<int32_t> counts(table.size() / sizeof(int32_t));
  std::memcpy(counts.data(), table.data(), table.size());
  report(texts, counts, options);
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("lda", [&] { run(parse(argc, argv)); });
}
