// Texts as numbers of words, for their topics.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phub::examples {

// All words of all documents.
struct Corpus {
  std::vector<std::string> words;                // by number, in the order in which they come
  std::vector<std::string> names;                // of the documents: their files, or numbers from 1
  std::vector<std::vector<uint32_t>> documents;  // the words of each, in their order
  bool is_counted = false;  // the file has counts of words, which somebody has chosen before
  uint64_t digest = 0;      // of the files
};

struct CorpusOptions {
  uint32_t least_letters = 3;  // shorter words are left out; not of a file with counts
  std::string vocabulary;      // the words of a file with counts, not looked at for others; "": a
                               // file beside it, if there is
};

// Reads documents:
//   a folder    of files .txt, a document each, by name
//   .ldac       Blei's, as gensim's BleiCorpus writes it: a line "n word:count …" for each
//   .mtx, .mm   a matrix (matrix_market.h) with a row for each document and a column for each word,
//               as gensim's MmCorpus writes it
//   all others  a document in each line
// In texts, of UTF-8, a word is a run of letters of any alphabet, whose case does not count. In
// files with counts words are numbers from 0; the vocabulary is a file FILE.vocab, or with .vocab
// in place of the extension, with a word in each line, or what gensim's Dictionary.save_as_text
// writes. Without one words are called like their numbers. Throws Error(kNotFound): there is no
// such file; Error(kInvalid): with its line, what is wrong and what to do.
Corpus read_corpus(const std::string& path, const CorpusOptions& options = {});

struct Texts {
  std::vector<std::string> words;                // by number, ascending
  std::vector<std::vector<uint32_t>> documents;  // the words of each, in their order
  uint64_t digest = 0;
};

struct TextOptions {
  uint32_t least_documents = 5;  // words in fewer documents are left out
  double most_documents = 0.25;  // and those in a larger part of them: they tell of no topic
};

// What is kept of them. A word that is not kept leaves nothing behind, and a document may be empty.
// Throws Error(kInvalid): no word is kept. `path`: of the corpus, for that.
Texts texts_of(const Corpus& corpus, const TextOptions& options, const std::string& path);

}  // namespace phub::examples
