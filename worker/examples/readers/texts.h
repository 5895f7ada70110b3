// Texts as numbers of words, for their topics.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phub::examples {

struct Texts {
  std::vector<std::string> words;                // by number, ascending
  std::vector<std::vector<uint32_t>> documents;  // the words of each, in their order
};

struct TextOptions {
  uint32_t least_letters = 3;    // shorter words are left out
  uint32_t least_documents = 5;  // as are those in fewer documents
  double most_documents = 0.25;  // and those in a larger part of them: they tell of no topic
};

// A file with a document in each line. A word is a run of letters of ASCII, whose case does not
// count; a word that is not kept leaves nothing behind, and a document may be empty. Throws
// Error(kNotFound): there is no such file; Error(kInvalid): no word of it is kept.
Texts read_texts(const std::string& path, const TextOptions& options = {});

}  // namespace phub::examples
