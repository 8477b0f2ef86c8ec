// Sphinx finds pages by the words of a query, but a section only if the whole query is in
// its heading. This also finds the sections of those pages whose headings have at least half of the words.
Scorer.title = 9;  // for a page with one of the words in a heading; less than objNameMatch

const searchPages = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const {alltitles, docnames, titles} = Search._index, stemmer = new Stemmer();
  const pages = searchPages(terms, excluded), files = new Map(pages.map(page => [page[0], page[5]]));
  const sections = Object.entries(alltitles).flatMap(([heading, places]) => {
    const words = splitQuery(heading.toLowerCase()).filter(word => !stopwords.has(word));
    const stems = new Set(words.map(word => stemmer.stemWord(word)));
    const shared = [...terms].filter(term => stems.has(term)).length;
    // 40 if the words are the same, and less for each one that only the query or only the heading has
    const score = 40 * (shared / terms.size) * (2 * shared / (terms.size + stems.size));
    if (shared < terms.size / 2) return [];
    return places.filter(([page]) => files.has(docnames[page])).map(([page, id]) => [
      docnames[page],
      titles[page] === heading ? heading : `${titles[page]} > ${heading}`,
      id === null ? "" : `#${id}`,
      null,
      score,
      files.get(docnames[page]),
      SearchResultKind.title,
    ]);
  });
  return [...pages, ...sections];
};
