#include "worker/examples/topic_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "worker/examples/files.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

constexpr uint32_t kSteps = 200;   // of expectation maximisation, at most
constexpr double kSettled = 1e-9;  // a step that changes all shares by less is the last
constexpr uint32_t kMostTopics = 4096;

std::vector<double> words_with(const TopicModel& model) {
  std::vector<double> sums(model.topics);
  for (size_t at = 0; at < model.counts.size(); ++at) sums[at % model.topics] += model.counts[at];
  return sums;
}

// The probability of each word in each topic, in the order of `counts`.
std::vector<double> probabilities(const TopicModel& model) {
  const std::vector<double> sums = words_with(model);
  const double all = model.beta * static_cast<double>(model.words.size());
  std::vector<double> found(model.counts.size());
  for (size_t at = 0; at < found.size(); ++at) {
    found[at] = (model.counts[at] + model.beta) / (sums[at % model.topics] + all);
  }
  return found;
}

// `words`: where each word of the document begins in `likely`.
std::vector<double> mixture_of(std::span<const size_t> words, std::span<const double> likely,
                               const TopicModel& model) {
  const uint32_t topics = model.topics;
  std::vector<double> shares(topics, 1.0 / topics), next(topics), of_word(topics);
  const double sum = static_cast<double>(words.size()) + model.alpha * topics;
  for (uint32_t step = 0; step < kSteps; ++step) {
    std::ranges::fill(next, model.alpha);
    for (const size_t word : words) {
      double all = 0;
      for (uint32_t k = 0; k < topics; ++k) all += of_word[k] = shares[k] * likely[word + k];
      for (uint32_t k = 0; k < topics; ++k) next[k] += of_word[k] / all;
    }
    double changed = 0;
    for (uint32_t k = 0; k < topics; ++k) {
      next[k] /= sum;
      changed = std::max(changed, std::abs(next[k] - shares[k]));
    }
    std::swap(shares, next);
    if (changed < kSettled) break;
  }
  return shares;
}

double head_number(std::string_view& rest, std::string_view name, const Lines& lines) {
  const bool is_named = next_word(rest) == name;
  const std::optional<double> number = number_in(next_word(rest));
  if (is_named && number && *number > 0 && std::isfinite(*number)) return *number;
  lines.refuse("a model begins with '# lda alpha A beta B': is this a file that lda --out wrote?");
}

}  // namespace

void write_model(const TopicModel& model, const std::string& path) {
  if (path.empty()) return;
  std::string lines = fmt::format("# lda alpha {} beta {}\n", model.alpha, model.beta);
  for (size_t word = 0; word < model.words.size(); ++word) {
    lines += model.words[word];
    for (uint32_t k = 0; k < model.topics; ++k) {
      lines += fmt::format(" {}", model.counts[word * model.topics + k]);
    }
    lines += '\n';
  }
  write_file(path, lines);
}

TopicModel read_topic_model(const std::string& path) {
  Lines lines(path);
  TopicModel model;
  std::string_view rest = lines.next().value_or("");
  next_word(rest);
  model.alpha = head_number(rest = trimmed(rest).starts_with("lda ") ? trimmed(rest).substr(4) : "",
                            "alpha", lines);
  model.beta = head_number(rest, "beta", lines);
  Names words(model.words);
  while (const auto line = lines.next()) {
    rest = *line;
    const std::string_view word = next_word(rest);
    if (word.empty() || words.find(word) != nullptr) {
      lines.refuse("'{}' is not a word that is new", shown(word));
    }
    words.of(word, lines);
    uint32_t topics = 0;
    for (std::string_view count; !(count = next_word(rest)).empty(); ++topics) {
      const std::optional<uint64_t> number = whole_number_in(count);
      if (!number || *number > std::numeric_limits<int32_t>::max() || topics == kMostTopics) {
        lines.refuse("'{}' is not how often the word has a topic, of {} at most", shown(count),
                     kMostTopics);
      }
      model.counts.push_back(static_cast<int32_t>(*number));
    }
    if (model.topics == 0) model.topics = topics;
    if (topics == 0 || topics != model.topics) {
      lines.refuse("it has {} counts, and the lines before have {}", topics, model.topics);
    }
  }
  if (model.words.empty()) fail(ErrorCode::kInvalid, "{} has no words: was it cut off?", path);
  return model;
}

std::vector<TopWords> top_words(const TopicModel& model, uint32_t most) {
  const std::vector<double> sums = words_with(model);
  const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
  std::vector<size_t> order(model.words.size());
  std::vector<TopWords> found(model.topics);
  for (uint32_t k = 0; k < model.topics; ++k) {
    const auto count = [&](size_t word) { return model.counts[word * model.topics + k]; };
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, {}, [&](size_t word) { return -count(word); });
    found[k].share = all > 0 ? sums[k] / all : 0;
    for (size_t i = 0; i < std::min<size_t>(most, order.size()) && count(order[i]) > 0; ++i) {
      found[k].words.emplace_back(model.words[order[i]], count(order[i]) / sums[k]);
    }
  }
  return found;
}

std::vector<Mixture> infer(const TopicModel& model, const Corpus& corpus) {
  const std::vector<double> likely = probabilities(model);
  std::vector<std::string> known = model.words;
  const Names words(known);
  std::vector<const uint32_t*> number(corpus.words.size());
  for (size_t w = 0; w < number.size(); ++w) number[w] = words.find(corpus.words[w]);
  std::vector<Mixture> mixtures;
  std::vector<size_t> of_document;
  for (const auto& document : corpus.documents) {
    of_document.clear();
    for (const uint32_t word : document) {
      if (number[word] != nullptr) of_document.push_back(size_t{*number[word]} * model.topics);
    }
    mixtures.push_back({.topics = mixture_of(of_document, likely, model),
                        .words = document.size(),
                        .unknown = document.size() - of_document.size()});
  }
  return mixtures;
}

}  // namespace phub::examples
