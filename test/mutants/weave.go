package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// envName is the environment variable that wakes one mutant of a woven package.
const envName = "CSI_NODE_MUTANT"

// woven is the text of a file that holds mutants asleep. Building a package
// once for all its mutants takes a fraction of the time of a build for each.
type woven struct {
	text    string   // of the file, sound so far
	faulty  []string // functions with a fault
	inserts map[int]string
}

// weave adds a mutant as a copy of the one function that it changes, with the
// fault, to which the sound function turns when the mutant is awake:
//
//	func (p *place) remove() error { if mutantAwake == "7" { return p.remove_7() }; …
//
// It reports whether that can be done: not if a mutant changes something else
// than the body of a function, or if a parameter has no name to pass on.
func (w *woven) weave(id int, m *mutant, faulty string) (bool, error) {
	sound, err := functions(w.text)
	if err != nil {
		return false, err
	}
	changed, err := functions(faulty)
	if err != nil {
		return false, err
	}
	if len(sound) != len(changed) {
		return false, nil
	}
	at := -1
	for i := range sound {
		if sound[i].text != changed[i].text {
			if at >= 0 {
				return false, nil
			}
			at = i
		}
	}
	if at < 0 || sound[at].signature != changed[at].signature {
		return false, nil
	}
	f := changed[at]
	name := f.decl.Name.Name + "_" + strconv.Itoa(id)
	call, ok := callOf(f.decl, name)
	if !ok {
		return false, nil
	}
	if w.inserts == nil {
		w.inserts = map[int]string{}
	}
	w.inserts[sound[at].body] += fmt.Sprintf(" if mutantAwake == %q { %s }; ", strconv.Itoa(id), call)
	nameAt := int(f.decl.Name.Pos()-f.decl.Pos()) + len(f.decl.Name.Name)
	// What the compiler says of it, it says under the mutant's name.
	w.faulty = append(w.faulty, fmt.Sprintf("//line mutant %s:1\n%s", m.name, f.text[:nameAt]+"_"+strconv.Itoa(id)+f.text[nameAt:]))
	return true, nil
}

// file returns the whole text of the file.
func (w *woven) file() string {
	var b strings.Builder
	places := []int{}
	for place := range w.inserts {
		places = append(places, place)
	}
	slices.Sort(places)
	last := 0
	for _, place := range places {
		b.WriteString(w.text[last:place] + w.inserts[place])
		last = place
	}
	b.WriteString(w.text[last:])
	return b.String() + "\n" + strings.Join(w.faulty, "\n")
}

// switchFile is the further file of a package that tells which mutant is awake.
func switchFile(pkg string) string {
	return fmt.Sprintf("package %s\n\nimport \"os\"\n\nvar mutantAwake = os.Getenv(%q)\n", pkg, envName)
}

// switchPath is where that file would be.
func switchPath(file string) string { return filepath.Join(filepath.Dir(file), "mutant_awake.go") }

// function is a function declaration within a file.
type function struct {
	decl      *ast.FuncDecl
	text      string
	signature string // text up to the body
	body      int    // offset behind its opening brace
}

func functions(text string) ([]function, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, "", text, 0)
	if err != nil {
		return nil, err
	}
	offset := func(p token.Pos) int { return fset.Position(p).Offset }
	var all []function
	for _, d := range f.Decls {
		if d, ok := d.(*ast.FuncDecl); ok && d.Body != nil {
			start, brace, end := offset(d.Pos()), offset(d.Body.Lbrace), offset(d.End())
			all = append(all, function{d, text[start:end], text[start:brace], brace + 1})
		}
	}
	return all, nil
}

// callOf returns the statement that passes all arguments on to a function of
// another name.
func callOf(d *ast.FuncDecl, name string) (string, bool) {
	if d.Recv != nil {
		names := d.Recv.List[0].Names
		if len(names) != 1 || names[0].Name == "_" {
			return "", false
		}
		name = names[0].Name + "." + name
	}
	var args []string
	for _, field := range d.Type.Params.List {
		if len(field.Names) == 0 {
			return "", false
		}
		for _, n := range field.Names {
			if n.Name == "_" {
				return "", false
			}
			arg := n.Name
			if _, variadic := field.Type.(*ast.Ellipsis); variadic {
				arg += "..."
			}
			args = append(args, arg)
		}
	}
	call := name + "(" + strings.Join(args, ", ") + ")"
	if d.Type.Results == nil {
		return call + "; return", true
	}
	return "return " + call, true
}
