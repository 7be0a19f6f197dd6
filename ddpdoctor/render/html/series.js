"use strict";
/* The tables of numbers, unpacked, and what all charts share: the zoom and the chosen rank. */

function words16(text) {
  return new Uint16Array(raw(text).buffer);
}

function raw(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) found[at] = binary.charCodeAt(at);
  return found;
}

class Series {
  constructor(packed) {
    this.edges = packed.edges;
    this.columns = this.edges.length - 1;
    this.ranks = packed.ranks;
    this.parts = packed.parts;
    this.times = packed.times;
    this.kinds = this.parts.length + 1;
    this.cells = words16(packed.cells);
    this.curves = {};
    for (const name of ["loss", "norm"]) {
      if (packed[name]) this.curves[name] = new Float32Array(raw(packed[name]).buffer);
    }
    this.seconds = new Float32Array(65536);
    this.seconds[0] = NaN;
    for (let code = 1; code < 65536; code++) this.seconds[code] = (2 ** ((code - 1) / 2048) - 1) / 1e6;
    this.steps = Array.from({ length: this.columns }, (_, column) => this.edges[column]);
  }

  /* Seconds of a part (or, behind the parts, of the longest step) of a rank, by its place. */
  at(place, kind, column) {
    return this.seconds[this.cells[(place * this.kinds + kind) * this.columns + column]];
  }

  own(place, column) {
    let sum = 0;
    for (let kind = 0; kind < this.parts.length - 1; kind++) sum += this.at(place, kind, column);
    return sum;
  }

  wait(place, column) {
    return this.at(place, this.parts.length - 1, column);
  }

  /* A value for each rank and column, ranks one after another. */
  table(value) {
    const found = new Float32Array(this.ranks.length * this.columns);
    for (let place = 0; place < this.ranks.length; place++) {
      for (let column = 0; column < this.columns; column++) {
        found[place * this.columns + column] = value(place, column);
      }
    }
    return found;
  }

  curve(name, place) {
    return this.curves[name].subarray(place * this.columns, (place + 1) * this.columns);
  }

  label(column) {
    const first = this.edges[column];
    const last = this.edges[column + 1] - 1;
    const when = this.times[column];
    const at = when === null || when === undefined ? "" : `, ${clock(when)} after the start`;
    return (first === last ? `step ${first}` : `steps ${first} to ${last}`) + at;
  }
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/* Least, median and most of several curves, column by column. */
function envelope(curves, columns) {
  const least = new Array(columns), middle = new Array(columns), most = new Array(columns);
  for (let column = 0; column < columns; column++) {
    const values = [];
    for (const curve of curves) {
      const value = curve[column];
      if (value === value && value !== null) values.push(value);
    }
    values.sort((a, b) => a - b);
    least[column] = values.length ? values[0] : null;
    most[column] = values.length ? values[values.length - 1] : null;
    middle[column] = values.length ? values[values.length >> 1] : null;
  }
  return { least, middle, most };
}

/* What the charts share; each tells the others by change(). */
const view = {
  range: null,
  rank: null,
  listeners: [],
  on(listener) {
    this.listeners.push(listener);
  },
  change(news) {
    Object.assign(this, news);
    for (const listener of this.listeners) listener(news);
  },
};
