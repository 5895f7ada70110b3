// The topics of texts, with a store (../iterstore/store.h): latent Dirichlet allocation by
// collapsed Gibbs sampling (Griffiths and Steyvers 2004, equation 5; divided as in AD-LDA, Newman
// et al. 2009).
//
// Every word of every document has a topic. A table counts how often each word has each topic; a
// thread itself counts how often each of its documents has it. In an iteration a thread draws a new
// topic for each word of its documents, from the counts as they were at the last clock and its own
// changes since.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "worker/examples/readers/texts.h"
#include "worker/iterstore/store.h"

namespace phub::examples {

struct TopicOptions {
  uint32_t topics = 20;
  double alpha = 0.1;  // the parameter of Dirichlet's distribution of a document's topics
  double beta = 0.01;  // the same for a topic's words
  uint64_t seed = 0;
};

class Topics {
 public:
  // A row for each word; a row of their sums.
  static std::vector<iterstore::TableSpec> tables(const Texts& texts, const TopicOptions& options);

  // One of `parts` parts of the documents, of about as many words. REQUIRES: texts lives as long.
  Topics(const Texts& texts, const TopicOptions& options, uint32_t part, uint32_t parts);

  // Once, before the first iteration: topics are drawn as if all were as likely. Clocks.
  void begin(iterstore::StoreThread& store);
  // Clocks once. In a virtual iteration it only accesses.
  void iterate(iterstore::StoreThread& store);

 private:
  uint32_t draw(const std::vector<int32_t>& of_word, const std::vector<int32_t>& of_document);

  const Texts& texts_;
  const TopicOptions options_;
  size_t first_ = 0, last_ = 0;                // documents
  std::vector<std::vector<uint16_t>> topics_;  // the topic of each of their words
  std::vector<std::vector<int32_t>> counts_;   // the number of words with each topic, by document
  std::vector<int32_t> sums_;                  // words with each topic, with this thread's changes
                                               // since
  std::vector<double> weights_;
  std::mt19937_64 random_;
};

}  // namespace phub::examples
