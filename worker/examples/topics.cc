#include "worker/examples/topics.h"

#include <algorithm>
#include <numeric>

namespace phub::examples {
namespace {

constexpr uint32_t kWords = 0, kSums = 1;  // tables

size_t words_in(const Texts& texts) {
  return std::accumulate(texts.documents.begin(), texts.documents.end(), size_t{0},
                         [](size_t sum, const auto& each) { return sum + each.size(); });
}

}  // namespace

std::vector<iterstore::TableSpec> Topics::tables(const Texts& texts, const TopicOptions& options) {
  return {
      {.name = "words",
       .rows = texts.words.size(),
       .columns = options.topics,
       .type = "i32",
       .operation = "add",
       .fixed = true},
      {.name = "sums", .rows = 1, .columns = options.topics, .type = "i32", .operation = "add"}};
}

Topics::Topics(const Texts& texts, const TopicOptions& options, uint32_t part, uint32_t parts)
    : texts_(texts), options_(options), weights_(options.topics) {
  const size_t all = words_in(texts);
  size_t before = 0;
  for (size_t d = 0; d < texts.documents.size(); ++d) {
    const size_t of = std::min<size_t>(parts * before / std::max<size_t>(all, 1), parts - 1);
    before += texts.documents[d].size();
    if (of < part) first_ = d + 1;
    if (of <= part) last_ = d + 1;
  }
  topics_.resize(last_ - first_);
  counts_.assign(last_ - first_, std::vector<int32_t>(options.topics));
  std::seed_seq seeds{static_cast<uint32_t>(options.seed),
                      static_cast<uint32_t>(options.seed >> 32), part};
  random_.seed(seeds);
}

void Topics::begin(iterstore::StoreThread& store) {
  std::uniform_int_distribution<uint32_t> any(0, options_.topics - 1);
  std::vector<int32_t> one(options_.topics);
  sums_.assign(options_.topics, 0);
  for (size_t d = first_; d < last_; ++d) {
    for (const uint32_t word : texts_.documents[d]) {
      const uint32_t topic = any(random_);
      topics_[d - first_].push_back(static_cast<uint16_t>(topic));
      ++counts_[d - first_][topic];
      ++sums_[topic];
      one[topic] = 1;
      store.update<int32_t>(kWords, word, one);
      one[topic] = 0;
    }
  }
  store.update<int32_t>(kSums, 0, sums_);
  store.clock();
}

uint32_t Topics::draw(const std::vector<int32_t>& of_word,
                      const std::vector<int32_t>& of_document) {
  const double all = options_.beta * static_cast<double>(texts_.words.size());
  double sum = 0;
  for (size_t k = 0; k < weights_.size(); ++k) {
    sum += (of_word[k] + options_.beta) * (of_document[k] + options_.alpha) / (sums_[k] + all);
    weights_[k] = sum;
  }
  const double at = std::uniform_real_distribution<double>(0, sum)(random_);
  const auto found = std::ranges::upper_bound(weights_, at);
  return static_cast<uint32_t>(
      std::min<ptrdiff_t>(found - weights_.begin(), static_cast<ptrdiff_t>(weights_.size()) - 1));
}

void Topics::iterate(iterstore::StoreThread& store) {
  std::vector<int32_t> of_word(options_.topics), by(options_.topics);
  sums_.resize(options_.topics);
  store.read<int32_t>(kSums, 0, sums_);
  const std::vector<int32_t> sums_before = sums_;
  for (size_t d = first_; d < last_; ++d) {
    std::vector<uint16_t>& topics = topics_[d - first_];
    std::vector<int32_t>& of_document = counts_[d - first_];
    for (size_t w = 0; w < topics.size(); ++w) {
      const uint32_t word = texts_.documents[d][w], old = topics[w];
      store.read<int32_t>(kWords, word, of_word);
      uint32_t now = old;
      if (!store.is_virtual()) {
        --of_word[old], --of_document[old], --sums_[old];
        now = draw(of_word, of_document);
        topics[w] = static_cast<uint16_t>(now);
        ++of_document[now], ++sums_[now];
      }
      --by[old], ++by[now];
      store.update<int32_t>(kWords, word, by);
      by[old] = by[now] = 0;
    }
  }
  std::ranges::transform(sums_, sums_before, by.begin(), std::minus<>());
  store.update<int32_t>(kSums, 0, by);
  store.clock();
}

}  // namespace phub::examples
