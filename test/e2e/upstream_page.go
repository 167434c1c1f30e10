//go:build upstream

package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// needsSELinux matches the tests that need a node with SELinux.
const needsSELinux = `\[FeatureGate:SELinuxMount|different SELinux context`

// spec is a test of Kubernetes, as ginkgo reports it.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText, State     string
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}
func (s spec) failed() bool { return s.State != "passed" && s.State != "skipped" }

// pattern is the kind of volume that it is run with.
func (s spec) pattern() string {
	if m := regexp.MustCompile(`^\[Testpattern: ([^\]]*)`).FindStringSubmatch(s.ContainerHierarchyTexts[1]); m != nil {
		return m[1]
	}
	return s.ContainerHierarchyTexts[1]
}

// suite is what it tests of that volume.
func (s spec) suite() string {
	name, _, _ := strings.Cut(regexp.MustCompile(`\[[^\]]*\] *`).ReplaceAllString(s.ContainerHierarchyTexts[1], ""), " ")
	return name
}

// upstreamPage is the page that tells what became of the tests, as `make e2e-upstream` writes it.
func upstreamPage(specs []spec) string {
	reasons := map[string]int{}
	var failures []string
	for _, s := range specs {
		switch {
		case s.failed():
			failures = append(failures, s.name())
		case s.State == "skipped":
			reasons[s.reason()]++
		}
	}
	var page strings.Builder
	fmt.Fprintf(&page, `# The storage tests of Kubernetes

Written by %s, which runs the suite [External Storage][suite] of Kubernetes %s on a node of that Kubernetes,
with the class %s of %s. What the plugin can do is told to it in %s.

[suite]: https://github.com/kubernetes/kubernetes/tree/%[2]s/test/e2e/storage/external

`, "`make e2e-upstream`", kubernetesVersion, "`csi-node-local`", "`deploy/base`", "`test/e2e/testdriver.yaml`")
	writeTable(&page, "of the volumes", specs, spec.pattern)
	writeTable(&page, "the tests", specs, spec.suite)
	page.WriteString("## What failed\n\n")
	if len(failures) == 0 {
		page.WriteString("Nothing.\n")
	}
	slices.Sort(failures)
	for _, name := range failures {
		page.WriteString("- " + strings.ReplaceAll(wrap(name, 118), "\n", "\n  ") + "\n")
	}
	page.WriteString("\n## What was skipped\n\nThe tests say why, except for the last line. \"Skipped\" in the tables above are all but that.\n\n| tests | because |\n| --- | --- |\n")
	for _, reason := range slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(reasons[b]-reasons[a], strings.Compare(a, b))
	}) {
		fmt.Fprintf(&page, "| %d | %s |\n", reasons[reason], reason)
	}
	page.WriteString("| left out | they mount with, or change, an SELinux context: the node has no SELinux |\n")
	return page.String()
}

// writeTable counts tests by what key says of them. What was only skipped has no row.
func writeTable(page *strings.Builder, head string, specs []spec, key func(spec) string) {
	type row struct{ passed, failed, skipped int }
	rows := map[string]*row{}
	for _, s := range specs {
		r := rows[key(s)]
		if r == nil {
			r = &row{}
			rows[key(s)] = r
		}
		switch {
		case s.failed():
			r.failed++
		case s.State == "passed":
			r.passed++
		default:
			r.skipped++
		}
	}
	fmt.Fprintf(page, "| %s | passed | failed | skipped |\n| --- | --- | --- | --- |\n", head)
	var sum row
	var only []string
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		r := rows[name]
		if r.passed+r.failed == 0 {
			only, sum.skipped = append(only, strings.TrimSpace(name)), sum.skipped+r.skipped
			continue
		}
		sum.passed, sum.failed = sum.passed+r.passed, sum.failed+r.failed
		fmt.Fprintf(page, "| %s | %d | %d | %d |\n", name, r.passed, r.failed, r.skipped)
	}
	fmt.Fprintf(page, "| all others | 0 | 0 | %d |\n", sum.skipped)
	fmt.Fprintf(page, "\n%s\n\n", wrap(fmt.Sprintf("%d passed, %d failed. The others: %s.", sum.passed, sum.failed, strings.Join(only, ", ")), 120))
}

// reason is why a test skipped itself, without who did.
func (s spec) reason() string {
	text := regexp.MustCompile(`,? -{0,2} ?skipping$`).ReplaceAllString(s.Failure.Message, "")
	text = regexp.MustCompile(`^(Driver|Suite) "?[^ "]+"? `).ReplaceAllString(text, "")
	return strings.ReplaceAll(text, "|", "\\|")
}

// wrap breaks text into lines.
func wrap(text string, width int) string {
	var all strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case column == 0:
		case column+1+len(word) > width:
			all.WriteByte('\n')
			column = 0
		default:
			all.WriteByte(' ')
			column++
		}
		all.WriteString(word)
		column += len(word)
	}
	return all.String()
}
