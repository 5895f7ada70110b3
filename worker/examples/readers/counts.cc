#include "worker/examples/readers/counts.h"

#include <cmath>
#include <filesystem>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/matrix_market.h"
#include "worker/examples/readers/names.h"

namespace phub::examples {
namespace {

// A count takes memory for each word that it counts, in lda up to 70 bytes: so many are believed
// for each byte of the file that was read, and anyway.
constexpr uint64_t kMostOfWord = 1'000'000, kMostOfAll = 1'000'000'000;
constexpr uint64_t kWordsOfByte = 8, kWordsAnyway = 1'000'000;
constexpr size_t kLongestDocument = size_t{1} << 30;  // bytes of a line of LDA-C
// What only has a number takes memory, too: so much is believed for each that is there, and anyway.
constexpr uint64_t kNumbersOfWord = 10, kNumbersAnyway = 1'000'000;
constexpr uint64_t kDocumentsOfEntry = 10, kDocumentsAnyway = 1'000'000;

// "" if there is none.
std::string vocabulary_beside(const std::string& path) {
  for (const std::filesystem::path& beside :
       {std::filesystem::path(path + ".vocab"),
        std::filesystem::path(path).replace_extension(".vocab")}) {
    if (std::filesystem::exists(beside)) return beside.string();
  }
  return "";
}

struct Vocabulary {
  std::string path;                // "": there is none
  std::vector<std::string> words;  // by number; "": none has it
  uint64_t digest = 0;
};

// A line for each word, or "number<tab>word<tab>documents", perhaps behind a line with the number
// of documents.
Vocabulary read_vocabulary(const std::string& path) {
  Vocabulary vocabulary{.path = path};
  if (path.empty()) return vocabulary;
  std::vector<std::string>& words = vocabulary.words;
  std::unordered_set<std::string> seen;
  Lines lines(path);
  bool is_gensims = false;
  while (const auto line = lines.next()) {
    std::string_view rest = *line;
    if (!is_gensims && lines.number() <= 2 && rest.find('\t') != rest.npos) {
      is_gensims = true;
      words.clear(), seen.clear();  // the line before had the number of documents
    }
    const std::optional<uint64_t> number =
        is_gensims ? whole_number_in(next_word(rest)) : words.size();
    const std::string word(is_gensims ? next_word(rest, "\t") : trimmed(rest));
    if (!number || *number > seen.size() * kNumbersOfWord + kNumbersAnyway) {
      lines.refuse("'{}' does not begin with a word's number", shown(*line));
    }
    if (word.empty() || word.find(' ') != word.npos) {
      lines.refuse("'{}' is not a word, which has no spaces", shown(word));
    }
    if (words.size() <= *number) words.resize(*number + 1);
    if (!seen.insert(word).second || !words[*number].empty()) {
      lines.refuse("the word '{}' or its number {} comes twice", shown(word), *number);
    }
    words[*number] = word;
  }
  vocabulary.digest = lines.digest();
  return vocabulary;
}

class CountedWords {
 public:
  CountedWords(Corpus& corpus, const std::string& vocabulary)
      : corpus_(corpus), vocabulary_(read_vocabulary(vocabulary)), words_(corpus.words) {}

  void add(uint64_t number, double count, std::vector<uint32_t>& document, const Lines& lines) {
    if (!(count >= 0 && count <= kMostOfWord && count == std::floor(count))) {
      lines.refuse(
          "{} is not how often a word comes, a whole number up to {}: topics are found of "
          "counts, not of weights as tf-idf",
          count, kMostOfWord);
    }
    all_ += static_cast<uint64_t>(count);
    if (all_ > kMostOfAll) lines.refuse("there are more than {} words in all", kMostOfAll);
    if (all_ > kWordsOfByte * lines.bytes() + kWordsAnyway) {
      lines.refuse(
          "its counts are {} words up to here, more than {} for each byte: divide all counts by a "
          "number",
          all_, kWordsOfByte);
    }
    if (count > 0) document.insert(document.end(), static_cast<size_t>(count), of(number, lines));
  }
  void finish(const Lines& lines) {
    corpus_.digest = lines.digest() ^ vocabulary_.digest;
    corpus_.is_counted = true;
    for (size_t d = 1; d <= corpus_.documents.size(); ++d) {
      corpus_.names.push_back(std::to_string(d));
    }
  }

 private:
  uint32_t of(uint64_t number, const Lines& lines) {
    if (vocabulary_.path.empty()) return words_.of(std::to_string(number), lines);
    if (number >= vocabulary_.words.size() || vocabulary_.words[number].empty()) {
      lines.refuse("the vocabulary {} has no word {}; numbers begin with 0", vocabulary_.path,
                   number);
    }
    return words_.of(vocabulary_.words[number], lines);
  }

  Corpus& corpus_;
  const Vocabulary vocabulary_;
  Names words_;
  uint64_t all_ = 0;
};

Corpus read_ldac(const std::string& path, const std::string& vocabulary) {
  Corpus corpus;
  CountedWords words(corpus, vocabulary);
  Lines lines(path, kLongestDocument);
  while (const auto line = lines.next()) {
    std::string_view rest = *line;
    const std::optional<uint64_t> said = whole_number_in(next_word(rest));
    if (!said) {
      lines.refuse("'{}' does not begin with the number of the document's words", shown(*line));
    }
    auto& document = corpus.documents.emplace_back();
    uint64_t found = 0;
    for (std::string_view pair; !(pair = next_word(rest)).empty(); ++found) {
      const std::optional<uint64_t> number = whole_number_in(next_field(pair, ':'));
      const std::optional<double> count = number_in(pair);
      if (!number || !count) lines.refuse("here a 'word:count' is none, after {}", found);
      words.add(*number, *count, document, lines);
    }
    if (found != *said) lines.refuse("it has {} words, and says {}: is it cut off?", found, *said);
  }
  words.finish(lines);
  return corpus;
}

Corpus read_matrix_of_counts(const std::string& path, const std::string& vocabulary) {
  Corpus corpus;
  CountedWords words(corpus, vocabulary);
  MatrixMarket matrix(path);
  uint64_t entries = 0;
  const auto count_to = [&](uint64_t documents) {
    if (documents > kDocumentsOfEntry * entries + kDocumentsAnyway) {
      matrix.lines().refuse("there are {} documents, and {} counts so far: are rows documents?",
                            documents, entries);
    }
    if (corpus.documents.size() < documents) corpus.documents.resize(documents);
  };
  while (const auto entry = matrix.next()) {
    ++entries;
    count_to(entry->row);
    words.add(entry->column - 1, entry->value, corpus.documents[entry->row - 1], matrix.lines());
  }
  count_to(matrix.rows());
  words.finish(matrix.lines());
  return corpus;
}

}  // namespace

bool is_name_of_counts(const std::string& path) {
  return extension_of(path) == "ldac" || MatrixMarket::is_name_of_one(path);
}

Corpus read_counts(const std::string& path, const std::string& vocabulary) {
  const std::string words = vocabulary.empty() ? vocabulary_beside(path) : vocabulary;
  return extension_of(path) == "ldac" ? read_ldac(path, words) : read_matrix_of_counts(path, words);
}

}  // namespace phub::examples
