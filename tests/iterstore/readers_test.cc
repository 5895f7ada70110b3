// The readers of users' files (worker/examples/readers), with real files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/temporary_directory.h"
#include "tests/worker/expect_error.h"
#include "worker/examples/readers/cells.h"
#include "worker/examples/readers/graph.h"
#include "worker/examples/readers/lines.h"
#include "worker/examples/readers/texts.h"

namespace phub::examples {
namespace readers_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Links = std::vector<Graph::Link>;

class Readers : public ::testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& text) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }

  // What reading such a file throws.
  template <typename Read>
  std::string refusal(const std::string& name, const std::string& text, const Read& read) {
    const std::string path = file(name, text);
    try {
      read(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(path));
      EXPECT_LT(std::string(error.what()).size(), 500);
      return error.what();
    }
    return "no error";
  }
  std::string links_refusal(const std::string& name, const std::string& text,
                            const LinkOptions& options = {}) {
    return refusal(name, text, [&](const std::string& path) { read_links(path, options); });
  }
  std::string cells_refusal(const std::string& name, const std::string& text) {
    return refusal(name, text, read_cells);
  }

  const TemporaryDirectory folder_;
};

// Every end of a line, and no memory for a line that has none.
TEST_F(Readers, LinesEndInEveryWay) {
  Lines lines(file("lines", "\xef\xbb\xbfone\r\n\ntwo\nthree\r"));
  std::vector<std::string> found;
  while (const auto line = lines.next()) found.emplace_back(*line);
  EXPECT_THAT(found, ElementsAre("one", "", "two", "three"));
  EXPECT_EQ(lines.number(), 5);
  Lines empty(file("empty", ""));
  EXPECT_FALSE(empty.next());
  Lines zeros("/dev/zero");
  testing::expect_error(ErrorCode::kInvalid, "/dev/zero, line 1: it has more than 1048576 bytes",
                        [&] { zeros.next(); });
  for (const char* begin : {"\x1f\x8b\x08", "PK\x03\x04", "\x28\xb5\x2f\xfd"}) {
    EXPECT_THAT(refusal("packed", begin, [](const std::string& path) { Lines of(path); }),
                HasSubstr("is compressed: unpack it before, with "));
  }
}

// A line may lie anywhere in the blocks in which a file is read.
TEST_F(Readers, LongFilesAreReadWhole) {
  std::string text;
  std::vector<size_t> lengths;
  for (size_t i = 0; text.size() < (3 << 20); ++i) {
    lengths.push_back((i * 7919) % 70'000);
    text += std::string(lengths.back(), static_cast<char>('a' + i % 26)) + "\n";
  }
  Lines lines(file("long", text));
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto line = lines.next();
    ASSERT_TRUE(line);
    ASSERT_EQ(*line, std::string(lengths[i], static_cast<char>('a' + i % 26))) << i;
  }
  EXPECT_FALSE(lines.next());
}

TEST_F(Readers, LinksOfNamedNodes) {
  const Graph graph = read_links(
      file("links", "# a comment\r\n% another\n\nköln bonn 2\nbonn\tköln\r\nköln bonn 0.5\nx y 0"));
  EXPECT_THAT(graph.names, ElementsAre("köln", "bonn", "x", "y"));
  EXPECT_EQ(graph.links, (Links{{0, 1, 2.5}, {1, 0, 1}}));
  const Graph table = read_links(file("links.CSV", "source,target,weight\nnew york, bonn,2\n"));
  EXPECT_THAT(table.names, ElementsAre("new york", "bonn"));
  EXPECT_EQ(table.links, (Links{{0, 1, 2}}));
  EXPECT_NE(graph.digest, table.digest);
}

TEST_F(Readers, LinksOfIgraphsAndScipysFormats) {
  const Graph large = read_links(file("graph.lgl", "# a\nb 2\nc\n# b\nc 0.25\n# alone\n"));
  EXPECT_THAT(large.names, ElementsAre("a", "b", "c", "alone"));
  EXPECT_EQ(large.links, (Links{{0, 1, 2}, {0, 2, 1}, {1, 2, 0.25}}));
  const Graph numbered = read_links(file("edges", "0 3\n3 1\n"), {.numbered = true});
  EXPECT_THAT(numbered.names, ElementsAre("0", "1", "2", "3"));
  EXPECT_EQ(numbered.links, (Links{{0, 3, 1}, {3, 1, 1}}));
  const Graph both = read_links(file("both", "a b\nb b 3\n"), {.undirected = true});
  EXPECT_EQ(both.links, (Links{{0, 1, 1}, {1, 0, 1}, {1, 1, 6}}));
  const Graph matrix = read_links(
      file("a.mtx", "%%MatrixMarket matrix coordinate integer symmetric\n%\n3 3 1\n2 1 5\n"));
  EXPECT_THAT(matrix.names, ElementsAre("1", "2", "3"));
  EXPECT_EQ(matrix.links, (Links{{0, 1, 5}, {1, 0, 5}}));
}

TEST_F(Readers, LinksThatAreNoneAreRefusedWithTheirLine) {
  for (const char* weight : {"nan", "inf", "-1", "1e300", "1e-300", "two", "1,5", "0x1p3"}) {
    EXPECT_THAT(links_refusal("links", std::string("a b\nb a ") + weight),
                AllOf(HasSubstr(", line 2: '"), HasSubstr(weight), HasSubstr("is not a weight")));
  }
  EXPECT_THAT(links_refusal("links", "# x\na\n"), HasSubstr("line 2: 'a' is not two nodes"));
  EXPECT_THAT(links_refusal("links", "a b 1 1998"),
              HasSubstr("line 1: a link is 'from to [weight]'"));
  EXPECT_THAT(links_refusal("links", "a b {'weight': 2}"), HasSubstr("line 1:"));
  EXPECT_THAT(links_refusal("links.csv", "a,\"b\"\n"), HasSubstr("line 1: quotes are not read"));
  EXPECT_THAT(links_refusal("links.csv", "a b\n"), HasSubstr("with commas between them"));
  for (const char* none : {"", "\n\n", "# only this\n"}) {
    EXPECT_THAT(links_refusal("links", none), HasSubstr("has no links"));
  }
  EXPECT_THAT(links_refusal("links", std::string("a b\na \0 b\n", 10)),
              HasSubstr("line 2: it has a zero"));
  EXPECT_THAT(links_refusal("a.graphml", "<graphml/>"), HasSubstr(".graphml is not read"));
  EXPECT_THAT(links_refusal("a.lgl", "b 1\n"), HasSubstr("line 1: a link comes before"));
  EXPECT_THAT(links_refusal("a.lgl", "# \n"), HasSubstr("line 1: a name is missing"));
}

// A number is no reason to take memory for all below it.
TEST_F(Readers, HugeNumbersOfNodesAreNotBelieved) {
  const LinkOptions numbered{.numbered = true};
  EXPECT_THAT(links_refusal("links", "0 4000000000\n", numbered), HasSubstr("Without --numbered"));
  for (const char* number : {"-1", "4294967295", "99999999999999999999", "1.5", "x"}) {
    EXPECT_THAT(links_refusal("links", std::string("0 1\n0 ") + number, numbered),
                HasSubstr("is not a node's number"));
  }
  EXPECT_EQ(read_links(file("links", "0 4000000000\n")).names.size(), 2);
  std::string many;
  for (int i = 0; i < 100'000; ++i) many += "0 1\n";
  EXPECT_EQ(read_links(file("links", many + "0 999998\n"), numbered).names.size(), 999'999);
  EXPECT_THAT(links_refusal("links", many + "0 1100000\n", numbered), HasSubstr("100001 links"));
  const std::string head = "%%MatrixMarket matrix coordinate real general\n";
  EXPECT_THAT(links_refusal("a.mtx", head + "4000000000 4000000000 1\n1 2 1\n"),
              HasSubstr("nodes up to number 4000000000"));
  EXPECT_THAT(links_refusal("a.mtx", head + "2 3 0\n"), HasSubstr("not 2 and 3"));
}

TEST_F(Readers, MatricesThatAreNoneAreRefusedWithTheirLine) {
  const std::string head = "%%MatrixMarket matrix coordinate real general\n";
  const std::vector<std::pair<std::string, const char*>> wrong = {
      {"1 2 3\n", "line 1: a file of this name begins with"},
      {"", "line 1: a file of this name begins with"},
      {"%%MatrixMarket matrix array real general\n2 2\n1\n", "line 1: 'array' matrices"},
      {"%%MatrixMarket matrix coordinate complex general\n", "line 1: 'complex' values"},
      {"%%MatrixMarket matrix coordinate real hermitian\n", "line 1: 'hermitian' matrices"},
      {head + "2 2\n", "line 2: here a matrix has"},
      {head, "line 2: here a matrix has"},
      {head + "2 -2 1\n", "line 2: here a matrix has"},
      {head + "99999999999 2 1\n1 1 1\n", "are the most"},
      {head + "2 2 1\n0 1 1\n", "line 3: entry 0, 1 is outside"},
      {head + "2 2 1\n1 3 1\n", "line 3: entry 1, 3 is outside"},
      {head + "2 2 1\n1 1 nan\n", "line 3: '1 1 nan' is not"},
      {head + "2 2 1\n1 1\n", "line 3: '1 1' is not"},
      {head + "2 2 1\n1 1 1 1\n", "line 3: '1 1 1 1' is not"},
      {head + "2 2 2\n1 1 1\n", "the file ends after 1 entries, and its head says 2"},
      {head + "2 2 1\n1 1 1\n1 2 1\n", "line 4: this is an entry more"},
  };
  for (const auto& [text, why] : wrong) {
    EXPECT_THAT(cells_refusal("a.mtx", text), HasSubstr(why)) << text;
  }
}

TEST_F(Readers, RatingsOfAllFormats) {
  const auto of = [](const Cells& cells) {
    std::string found;
    for (const Cell& cell : cells.cells) {
      found +=
          fmt::format("{} {} {};", cells.rows[cell.row], cells.columns[cell.column], cell.value);
    }
    return found;
  };
  for (const char* text :
       {"u a 3\nu b 4\nv a 5\n", "user,item,rating,time\r\nu,a,3,9\r\nu,b,4,9\r\nv,a,5,9",
        "u::a::3::9\nu::b::4::9\nv::a::5::9\n", "# of films\nu\ta\t1\nu\tb\t4\nv\ta\t5\nu\ta\t3\n",
        "u, a, 3,\nu, b, 4\nv  a \t5\n"}) {
    EXPECT_EQ(of(read_cells(file("ratings", text))), "u a 3;u b 4;v a 5;") << text;
  }
  EXPECT_EQ(of(read_cells(file("ratings", "1:2 3 4\na:b,c:,5\n"))), "1:2 3 4;a:b c: 5;");
  EXPECT_EQ(of(read_cells(file("r.csv", "\"user\",\"item\",\"stars\"\na::b, c:d ,5,\"x, y\"\n"))),
            "a::b c:d 5;");
  const std::string matrix =
      "%%MatrixMarket matrix coordinate real general\n9 9 2\n9 2 3\n 1  2 0\n";
  EXPECT_EQ(of(read_cells(file("a.mtx", matrix))), "9 2 3;1 2 0;");
  EXPECT_THAT(read_pairs(file("pairs", "u a\nv,b,3\n")),
              ElementsAre(std::pair("u", "a"), std::pair("v", "b")));
  for (const char* heading : {"userId,movieId", "User-ID,\"item_id\",rating", "ROW,COLUMN"}) {
    const auto pairs = read_pairs(file("pairs.csv", fmt::format("{}\nu,a\nuser,item\n", heading)));
    EXPECT_THAT(pairs, ElementsAre(std::pair("u", "a"), std::pair("user", "item"))) << heading;
  }
  EXPECT_EQ(read_pairs(file("pairs.csv", "user1,item1\nuser,of\n")).size(), 2);
  for (const char* value : {"nan", "inf", "-inf", "1e999", "", "x"}) {
    EXPECT_THAT(cells_refusal("ratings", std::string("u a 1\nu b ") + value),
                HasSubstr("line 2: 'u b"))
        << value;
  }
  // A field that is empty is no reason to take the next one for it.
  for (const char* line :
       {"1,,4.0,964982703", ",31,4.0", "1,31,,964982703", "1,31", "1::::4.0::9", "1\t\t4.0\t9"}) {
    for (const char* name : {"ratings", "ratings.csv"}) {
      EXPECT_THAT(cells_refusal(name, std::string("1,31,2\n") + line), HasSubstr("line 2: '"))
          << line;
      EXPECT_THAT(cells_refusal(name, line), HasSubstr("line 1: '")) << line;  // it is no heading
    }
  }
  for (const char* line : {"1,31,x", "u,a,x,9", "u 31 4.0", "new york,a,3", "\"a,b\",3,4"}) {
    EXPECT_THAT(cells_refusal("ratings.csv", line), HasSubstr("line 1: '")) << line;
  }
  for (const char* none : {"", "user item rating\n", "#\n"}) {
    EXPECT_THAT(cells_refusal("ratings", none), HasSubstr("has no lines with a row"));
  }
  for (const char* line : {"u\n", "u,,a\n", "u,\n"}) {
    EXPECT_THAT(refusal("pairs", line, read_pairs), HasSubstr("' is not a row and a column"));
  }
}

TEST_F(Readers, TheShareThatIsHeldOutIsTheOneAskedFor) {
  std::string text;
  for (int i = 0; i < 10'000; ++i) text += fmt::format("{} {} 1\n", i % 100, i / 100);
  const std::string path = file("ratings", text);
  for (const double share : {0.0, 0.05, 0.5}) {
    Cells cells = read_cells(path);
    const std::vector<Cell> held_out = take_held_out(cells, share, 1);
    EXPECT_EQ(cells.cells.size() + held_out.size(), 10'000);
    EXPECT_NEAR(static_cast<double>(held_out.size()) / 1e4, share, 0.03);
  }
}

using Documents = std::vector<std::vector<uint32_t>>;

TEST_F(Readers, WordsOfTexts) {
  const Corpus corpus = read_corpus(file("texts", "One, ONE…two-3x\r\n\nÄpfel äpfel ДВА два of\n"),
                                    {.least_letters = 3});
  EXPECT_THAT(corpus.words, ElementsAre("one", "two", "äpfel", "два"));
  EXPECT_EQ(corpus.documents, (Documents{{0, 0, 1}, {}, {2, 2, 3, 3}}));
  EXPECT_THAT(corpus.names, ElementsAre("1", "2", "3"));
  const Texts kept = texts_of(corpus, {.least_documents = 1, .most_documents = 0.5}, "texts");
  EXPECT_THAT(kept.words, ElementsAre("one", "two", "äpfel", "два"));
  EXPECT_THAT(
      refusal("texts", "one\ncaf\xe9\n", [](const std::string& path) { read_corpus(path); }),
      AllOf(HasSubstr("line 2: it is not UTF-8 at byte 0xe9"), HasSubstr("iconv")));
  std::filesystem::create_directory(folder_.path() + "/folder");
  file("folder/b.txt", "two");
  file("folder/a.TXT", "one\none");
  file("folder/c.md", "three");
  const Corpus folder = read_corpus(folder_.path() + "/folder");
  EXPECT_THAT(folder.names, ElementsAre("a.TXT", "b.txt"));
  EXPECT_EQ(folder.documents, (Documents{{0, 0}, {1}}));
  EXPECT_NE(folder.digest, corpus.digest);
}

// A word is kept that is in enough documents, and not in too many.
TEST_F(Readers, WordsThatTellNothingAreLeftOut) {
  const std::string path = file("texts", "all rare some\nall some\nall other some\nall other\n");
  const Texts kept =
      texts_of(read_corpus(path), {.least_documents = 2, .most_documents = 0.75}, path);
  EXPECT_THAT(kept.words, ElementsAre("other", "some"));
  EXPECT_EQ(kept.documents, (Documents{{1}, {1}, {0, 1}, {0}}));
  testing::expect_error(ErrorCode::kInvalid, "no word is in at least 5 and at most 1 documents",
                        [&] { texts_of(read_corpus(path), {}, path); });
}

TEST_F(Readers, CountsOfBleisAndGensimsFormats) {
  const std::string ldac = file("corpus.ldac", "2 0:2 7:1\r\n0\n1 7:1\n");
  const std::string matrix =
      file("corpus.mm",
           "%%MatrixMarket matrix coordinate real general\n3 8 3   \n1 1 2\n1 8 1.0\n3 8 1\n");
  for (const std::string& path : {ldac, matrix}) {
    const Corpus corpus = read_corpus(path);
    EXPECT_THAT(corpus.words, ElementsAre("0", "7"));
    EXPECT_EQ(corpus.documents, (Documents{{0, 0, 1}, {}, {1}}));
    EXPECT_TRUE(corpus.is_counted);
  }
  const auto words_with = [&](const std::string& vocabulary) {
    return read_corpus(ldac, {.vocabulary = file("words", vocabulary)}).words;
  };
  EXPECT_THAT(words_with("a\nb\nc\nd\ne\nf\ng\nh\n"), ElementsAre("a", "h"));
  EXPECT_THAT(words_with("3\n7\th\t2\n0\ta\t1\n"), ElementsAre("a", "h"));
  EXPECT_THAT(words_with("7\th\t2\n0\ta\t1\n"), ElementsAre("a", "h"));
  const auto vocabulary_refusal = [&](const std::string& text) {
    return refusal("words", text,
                   [&](const std::string& path) { read_corpus(ldac, {.vocabulary = path}); });
  };
  EXPECT_THAT(vocabulary_refusal("a\nb\na\n"), HasSubstr("line 3: the word 'a'"));
  EXPECT_THAT(vocabulary_refusal("a\nnew york\n"), HasSubstr("line 2: 'new york' is not a word"));
  EXPECT_THAT(vocabulary_refusal("9999999999\ta\t1\n"), HasSubstr("line 1: '9999999999"));
  EXPECT_THAT(vocabulary_refusal("0\ta\t1\n"), HasSubstr("has no word 7"));
  EXPECT_THAT(vocabulary_refusal("0\ta\t1\n1000100\tb\t1\n"), HasSubstr("line 2: '1000100"));
}

// A few bytes are no reason to take memory for all words and documents that they speak of.
TEST_F(Readers, HugeCountsAreNotBelieved) {
  const auto counts_refusal = [&](const std::string& name, const std::string& text) {
    return refusal(name, text, [](const std::string& path) { read_corpus(path); });
  };
  EXPECT_EQ(read_corpus(file("one.ldac", "1 0:1000000\n")).documents[0].size(), 1'000'000);
  EXPECT_THAT(counts_refusal("a.ldac", "1 0:1000000\n1 0:9999\n"),
              HasSubstr("line 2: its counts are 1009999 words up to here"));
  const std::string head = "%%MatrixMarket matrix coordinate integer general\n";
  EXPECT_THAT(counts_refusal("a.mtx", head + "1 2 2\n1 1 999999\n1 2 9999\n"),
              HasSubstr("line 4: its counts are 1009998 words"));
  EXPECT_THAT(counts_refusal("a.mtx", head + "1000100 1 1\n1 1 1\n"),
              HasSubstr("there are 1000100 documents, and 1 counts so far"));
}

}  // namespace readers_test
}  // namespace phub::examples
