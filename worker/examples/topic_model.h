// The topics that were found in texts, and their file: a line "# lda alpha A beta B", then for each
// word a line "word count …" that says how often it has each topic.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "worker/examples/readers/texts.h"

namespace phub::examples {

struct TopicModel {
  double alpha = 0, beta = 0;  // topics.h
  uint32_t topics = 0;
  std::vector<std::string> words;  // by number
  std::vector<int32_t> counts;     // of each word in turn, how often it has each topic
};

void write_model(const TopicModel& model, const std::string& path);
// Throws Error: kNotFound, there is no such file; kInvalid, with the line, it is no model.
TopicModel read_topic_model(const std::string& path);

// A topic's words that are most frequent, `most` of them, with their shares of the topic's words.
struct TopWords {
  double share = 0;  // of the topic, of all words
  std::vector<std::pair<std::string, double>> words;
};
std::vector<TopWords> top_words(const TopicModel& model, uint32_t most);

struct Mixture {
  std::vector<double> topics;  // their shares of the document, whose sum is 1
  uint64_t words = 0;          // of the document
  uint64_t unknown = 0;        // of these, those that the model does not have
};
// The topics of documents that the model was not made of: the mixture that is likeliest for the
// words, by expectation maximisation, with alpha as in the model. The same in every run.
std::vector<Mixture> infer(const TopicModel& model, const Corpus& corpus);

}  // namespace phub::examples
