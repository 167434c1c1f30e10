// Package docs holds what is written for people to the program: links, commands,
// flags, manifests, error texts, metrics, and the picture of the demo. Each file here is about
// one of these; begin with TestLinksResolve in pages_test.go.
package docs

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

const root = "../.."

func TestMain(m *testing.M) { harness.Main(m) }

// page is a text in Markdown, taken apart.
type page struct {
	name     string // from the root of the repository
	lines    []string
	headings []heading
	spans    []string // of code within a sentence; one of several lines has spaces between them
	blocks   []block
	prose    string // without any code
}

type heading struct {
	level int
	text  string
}

// block is a block of code. The language is that of its fence; one that is only indented has none.
type block struct{ language, text string }

// chartPage is that of the Helm chart.
const chartPage = "deploy/chart/README.md"

// pages returns every page that is written for people.
func pages(t *testing.T) []page {
	t.Helper()
	var names []string
	for _, pattern := range []string{"*.md", "docs/*.md", chartPage} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		names = append(names, found...)
	}
	if len(names) < 15 {
		t.Fatalf("found only the pages %q", names)
	}
	var all []page
	for _, name := range names {
		name, err := filepath.Rel(root, name)
		require.NoError(t, err)
		all = append(all, parse(name, read(t, name)))
	}
	return all
}

func pageNamed(t *testing.T, name string) page {
	t.Helper()
	return parse(name, read(t, name))
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(text)
}

var (
	headingLine = regexp.MustCompile("^(#+) (.*)$")
	indented    = regexp.MustCompile(`^ {4,}\S`)
	listItem    = regexp.MustCompile(`^\s*(?:[-*]|\d+\.) `)
	codeSpan    = regexp.MustCompile("`([^`]+)`")
)

func parse(name, text string) page {
	p := page{name: name, lines: strings.Split(strings.TrimSuffix(text, "\n"), "\n")}
	var prose []string
	fence, inList, blank := false, false, true
	var now *block
	end := func() {
		if now != nil {
			p.blocks, now = append(p.blocks, *now), nil
		}
	}
	for _, line := range p.lines {
		switch {
		case strings.HasPrefix(strings.TrimSpace(line), "```"):
			if fence = !fence; fence {
				end()
				now = &block{language: strings.TrimPrefix(strings.TrimSpace(line), "```")}
			} else {
				end()
			}
			continue
		case fence:
			now.text += line + "\n"
			continue
		case now != nil && (line == "" || indented.MatchString(line)),
			blank && indented.MatchString(line) && (!inList || strings.HasPrefix(line, "       ")):
			if now == nil {
				now = &block{}
			}
			now.text += strings.TrimSpace(line) + "\n"
			continue
		}
		end()
		blank = line == ""
		inList = listItem.MatchString(line) || inList && (blank || strings.HasPrefix(line, " "))
		if m := headingLine.FindStringSubmatch(line); m != nil {
			p.headings = append(p.headings, heading{len(m[1]), m[2]})
		}
		prose = append(prose, line)
	}
	end()
	for paragraph := range strings.SplitSeq(strings.Join(prose, "\n"), "\n\n") {
		for _, m := range codeSpan.FindAllStringSubmatch(paragraph, -1) {
			p.spans = append(p.spans, strings.Join(strings.Fields(m[1]), " "))
		}
	}
	p.prose = codeSpan.ReplaceAllString(strings.Join(prose, "\n"), "`code`")
	return p
}

// anchors returns the fragments by which links reach the page's headings, as GitHub makes them.
func (p page) anchors() []string {
	var all []string
	for _, h := range p.headings {
		text := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(h.text, "$1")
		text = regexp.MustCompile(`[^\p{L}\p{N}\s_-]`).ReplaceAllString(strings.ToLower(text), "")
		all = append(all, strings.ReplaceAll(text, " ", "-"))
	}
	return all
}

// code returns the commands and other code of the page: the spans, and the lines of the blocks that
// are no listing in some language. A line that ends with a backslash goes on.
func (p page) code() []string {
	all := slices.Clone(p.spans)
	for _, b := range p.blocks {
		if b.language == "" || b.language == "console" {
			all = append(all, strings.Split(strings.ReplaceAll(b.text, "\\\n", " "), "\n")...)
		}
	}
	return all
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestLinksResolve(t *testing.T) {
	seen := 0
	for _, p := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(p.prose, -1) {
			if strings.HasPrefix(m[1], "https://") {
				continue
			}
			seen++
			target, fragment, _ := strings.Cut(m[1], "#")
			name := p.name
			if target != "" {
				name = path.Join(path.Dir(p.name), target)
			}
			if _, err := os.Stat(filepath.Join(root, name)); err != nil {
				t.Errorf("%s has a link to %s, which is not there", p.name, m[1])
				continue
			}
			if fragment != "" && !slices.Contains(pageNamed(t, name).anchors(), fragment) {
				t.Errorf("%s has a link to %s, and %s has no such heading", p.name, m[1], name)
			}
		}
	}
	if seen < 100 {
		t.Errorf("found only %d links", seen)
	}
}

// A page that begins with a list of its headings has all of them there, in their order.
func TestContentsAreComplete(t *testing.T) {
	for _, p := range pages(t) {
		var listed, want []string
		for _, line := range p.lines[min(2, len(p.lines)):] {
			m := regexp.MustCompile(`^- \[.*\]\(#(.*)\)$`).FindStringSubmatch(line)
			if m != nil {
				listed = append(listed, m[1])
			} else if len(listed) > 0 {
				break
			}
		}
		if len(listed) == 0 {
			continue
		}
		for i, anchor := range p.anchors() {
			if p.headings[i].level == 2 {
				want = append(want, anchor)
			}
		}
		if !slices.Equal(listed, want) {
			t.Errorf("%s lists the headings %q and has %q", p.name, listed, want)
		}
	}
}

// Pages can be read in any editor, and the first of them without much scrolling.
func TestPagesAreNarrowAndTheFirstIsShort(t *testing.T) {
	for _, p := range pages(t) {
		for i, line := range p.lines {
			if n := len([]rune(line)); n > 120 {
				t.Errorf("%s:%d has %d columns, more than 120", p.name, i+1, n)
			}
		}
		if p.name == "README.md" && len(p.lines) > 100 {
			t.Errorf("README.md has %d lines, more than 100: what is long belongs to docs", len(p.lines))
		}
	}
}

// generated are files that are named before they are there.
var generated = []string{"docs/performance.md", "docs/upstream.md", "bin/csi-node", "bin/release/"}

var (
	// repositoryPath is a path of a file, or one in a folder at the root of the repository.
	fileName       = regexp.MustCompile(`^[\w./-]+\.(?:go|md|yaml|svg)$`)
	repositoryPath = regexp.MustCompile(`^(?:\.ci|\.github|bin|cmd|deploy|docs|examples|hack|pkg|test)/[\w./-]+$`)
	// manifestPath is what kubectl applies.
	manifestPath = regexp.MustCompile(`kubectl .*-[fk] ([\w./-]+)`)
)

// TestNamedFilesExist: a file that is named by its path is there, in the repository's root, in pkg (as
// architecture.md says) or in docs.
func TestNamedFilesExist(t *testing.T) {
	seen := 0
	for _, p := range pages(t) {
		if p.name == "docs/kubelet.md" {
			continue // which names those of Kubernetes
		}
		var named []string
		for _, span := range p.spans {
			if fileName.MatchString(span) || repositoryPath.MatchString(span) {
				named = append(named, span)
			}
		}
		for _, line := range p.code() {
			for _, m := range manifestPath.FindAllStringSubmatch(line, -1) {
				if m[1] != "-" {
					named = append(named, m[1])
				}
			}
		}
		for _, name := range named {
			seen++
			if !slices.Contains(generated, name) && !onNode(name) && !slices.ContainsFunc([]string{"", "pkg", "docs"}, func(below string) bool {
				_, err := os.Stat(filepath.Join(root, below, name))
				return err == nil
			}) {
				t.Errorf("%s names %s, which is neither in the repository's root nor in pkg or docs", p.name, name)
			}
		}
	}
	if seen < 100 {
		t.Errorf("found only %d files named", seen)
	}
}

// onNode says whether a path is one of a node, and not of the repository.
func onNode(name string) bool {
	return strings.HasPrefix(name, "/") || slices.Contains([]string{"values.yaml"}, name)
}
