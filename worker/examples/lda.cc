// Finds the topics of texts (latent Dirichlet allocation), in one process or in several, each of
// several threads:
//
//   bin/lda --in texts/ --out model.txt --top-words topics.txt
//   bin/lda --model model.txt --infer new-texts/
//
//   bin/phub serve --listen 127.0.0.1:7717 &
//   for rank in 0 1; do bin/lda --world 2 --rank $rank --in chapters & done; wait
//
// A folder has files .txt, another file a document in each line; or counts, .ldac and .mtx.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "transport/error.h"
#include "worker/examples/files.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"
#include "worker/examples/readers/counts.h"
#include "worker/examples/readers/texts.h"
#include "worker/examples/store_program.h"
#include "worker/examples/topic_model.h"
#include "worker/examples/topics.h"

namespace phub::examples {
namespace {

constexpr uint32_t kShown = 8;        // words of a topic, on the terminal
constexpr double kLeastShare = 0.01;  // of a document, of a topic that is written

struct Options {
  StoreProgram program;
  TopicOptions topics;
  CorpusOptions corpus;
  TextOptions words;
  bool chosen_words = false;  // by --least-documents or --most-documents
  std::string texts = "texts", out, top_out, model, inferred_texts, inferred;
  uint32_t top = 10;
};

void add_files(CLI::App& app, Options& options) {
  auto* texts = app.add_option("--in,--texts", options.texts,
                               "A folder of .txt, a file with a document in each line, or counts "
                               "of words: .ldac, .mtx")
                    ->capture_default_str();
  app.add_option("--vocabulary", options.corpus.vocabulary,
                 "The words of .ldac and .mtx [what is beside the file, .vocab]");
  auto* out =
      app.add_option("--out", options.out, "Write how often each word has each topic: the model");
  auto* top = app.add_option("--top-words", options.top_out,
                             "Write each topic's most frequent words to this file");
  app.add_option("--top", options.top, "So many of them")
      ->check(CLI::Range(1u, 1'000'000u))
      ->capture_default_str();
  auto* infer = app.add_option("--infer", options.inferred_texts,
                               "Documents as in --in, whose topics are written");
  app.add_option("--inferred", options.inferred, "To this file [they are printed]")->needs(infer);
  app.add_option("--model", options.model, "Infer with what --out wrote, without --in")
      ->needs(infer)
      ->excludes(texts)
      ->excludes(out)
      ->excludes(top);
}

Options parse(int argc, char** argv) {
  Options options;
  options.program.iterations = 200;
  options.program.store.worker = options_from_environment();
  if (auto& name = options.program.store.worker.spec.name; name.empty()) name = "lda";
  CLI::App app("Finds the topics of texts, one process per rank.");
  add_store_options(app, options.program);
  add_files(app, options);
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
  parse_or_exit(app, argc, argv);
  options.chosen_words = app.get_option("--least-documents")->count() > 0 ||
                         app.get_option("--most-documents")->count() > 0;
  return options;
}

std::string lines_of(const TopWords& topic, uint32_t number) {
  std::string line = fmt::format("topic {} {:.6f}:", number, topic.share);
  for (const auto& [word, share] : topic.words) line += fmt::format(" {} {:.6f}", word, share);
  return line + '\n';
}

void report(const TopicModel& model, size_t documents, const Options& options) {
  fmt::print("{} documents, {} words\n", documents, model.words.size());
  const std::vector<TopWords> topics = top_words(model, std::max(kShown, options.top));
  std::string lines;
  for (uint32_t k = 0; k < topics.size(); ++k) {
    TopWords written = topics[k];
    fmt::print("topic {}:", k);
    for (size_t i = 0; i < std::min<size_t>(kShown, written.words.size()); ++i) {
      fmt::print(" {}", written.words[i].first);
    }
    fmt::print("\n");
    written.words.resize(std::min<size_t>(options.top, written.words.size()));
    lines += lines_of(written, k);
  }
  write_file(options.top_out, lines);
  write_model(model, options.out);
}

// Of each document a line: its name, and its topics by share, "topic:share".
void write_inferred(const TopicModel& model, const Options& options) {
  if (options.inferred_texts.empty()) return;
  const Corpus corpus = read_corpus(options.inferred_texts, options.corpus);
  const std::vector<Mixture> mixtures = infer(model, corpus);
  std::string lines;
  uint64_t words = 0, unknown = 0;
  for (size_t d = 0; d < mixtures.size(); ++d) {
    std::vector<std::pair<double, uint32_t>> shares;
    for (uint32_t k = 0; k < model.topics; ++k) shares.emplace_back(-mixtures[d].topics[k], k);
    std::ranges::sort(shares);
    lines += corpus.names[d];
    for (const auto& [share, topic] : shares) {
      if (-share >= kLeastShare) lines += fmt::format(" {}:{:.6f}", topic, -share);
    }
    lines += '\n';
    words += mixtures[d].words;
    unknown += mixtures[d].unknown;
  }
  if (options.inferred.empty()) fmt::print("{}", lines);
  write_file(options.inferred, lines);
  fmt::print(stderr, "{} documents; the model has {} of their {} words\n", mixtures.size(),
             words - unknown, words);
}

// Sets which words are kept, if none has chosen that.
Texts texts_for(Options& options) {
  const Corpus corpus = read_corpus(options.texts, options.corpus);
  if (corpus.is_counted && !options.chosen_words) {
    options.words = {.least_documents = 1, .most_documents = 1};  // who counted has chosen
  }
  return texts_of(corpus, options.words, options.texts);
}

void train(Options options) {
  StoreProgram& program = options.program;
  Texts texts = texts_for(options);
  program.store.tables = Topics::tables(texts, options.topics);
  const auto box = own_box(program);
  iterstore::Store store(program.store);
  agree(program, "lda",
        {fmt::format("seed {}", options.topics.seed), fmt::format("alpha {}", options.topics.alpha),
         fmt::format("beta {}", options.topics.beta),
         fmt::format("least-documents {}", options.words.least_documents),
         fmt::format("most-documents {}", options.words.most_documents),
         fmt::format("documents {}", texts.documents.size()),
         fmt::format("file {:016x}", texts.digest)});
  run_threads(store, program, [&](iterstore::StoreThread& mine, uint32_t part) {
    Topics topics(texts, options.topics, part, parts_of(program));
    topics.begin(mine);
    run_iterations(mine, program, [&](uint32_t) { topics.iterate(mine); });
  });
  const std::vector<std::byte> table = store.table(0);
  if (program.store.worker.rank != 0) return;
  TopicModel model{.alpha = options.topics.alpha,
                   .beta = options.topics.beta,
                   .topics = options.topics.topics,
                   .words = std::move(texts.words),
                   .counts = std::vector<int32_t>(table.size() / sizeof(int32_t))};
  std::memcpy(model.counts.data(), table.data(), table.size());
  report(model, texts.documents.size(), options);
  write_inferred(model, options);
}

// One of --in and --infer may be texts.
void check_vocabulary(const Options& options) {
  const bool is_training = options.model.empty();
  if (options.corpus.vocabulary.empty() || is_name_of_counts(options.inferred_texts) ||
      (is_training && is_name_of_counts(options.texts))) {
    return;
  }
  fail(ErrorCode::kInvalid, "{}: --vocabulary is for files .ldac and .mtx, with numbers of words",
       is_training ? options.texts : options.inferred_texts);
}

void run(const Options& options) {
  check_vocabulary(options);
  for (const std::string& out : {options.out, options.top_out, options.inferred}) {
    check_can_write(out);
  }
  if (options.model.empty()) {
    // Mistakes in what is inferred come before the work.
    if (!options.inferred_texts.empty()) read_corpus(options.inferred_texts, options.corpus);
    return train(options);
  }
  write_inferred(read_topic_model(options.model), options);
}

}  // namespace
}  // namespace phub::examples

int main(int argc, char** argv) {
  using namespace phub::examples;  // NOLINT
  return status_of("lda", [&] { run(parse(argc, argv)); });
}
